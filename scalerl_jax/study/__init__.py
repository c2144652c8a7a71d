"""A study: many runs of one base config, from its members to their results.

members.py        the runs of a study: members, seeds, names, equal configs; the models that they start from
plan_file.py      the definition of a study in a file, which later starts check against
running.py        runs all of them, in order
board.py          their processes and progress, on a terminal and in a log
study_results.py  fits, comparisons, margins
writing.py        the results as study.json, evaluations.csv and study.html
command.py        scalerl-study; writes launch files instead of running
"""
