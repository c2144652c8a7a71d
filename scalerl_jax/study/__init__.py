"""A study: many runs of one base config, from its members to what came of them.

members.py     the runs of a study: members, seeds, names, those that are the same
warm_start.py  the models that they start from
plan_file.py   what a study is, written down: the next start holds itself against it
finished.py    which runs are done, and how far the others are
shares.py      cores and GPUs for members that run at a time
child.py       one member or warm start as a process
running.py     all of them, in order, until each has ended
board.py       how they are doing, on a terminal and in a log
launching.py   launch files in the place of running
results.py     fits, comparisons, margins
telling.py     these on a terminal
writing.py     these as study.json, evaluations.csv and study.html
command.py     scalerl-study
"""
