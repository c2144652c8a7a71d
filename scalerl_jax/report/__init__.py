"""The report of one or several runs: one HTML file that opens anywhere and loads nothing from a network.

score.py     evaluations, the fit, the forecast, the parts of a mixture
health.py    series of the updates, thinned, with their limits and alarms
time_line.py waits along the run, and for what; device-hours by role
samples.py   sampled completions to read, within a size
log_rows.py  rows of the logs, checked; their numbers, rounded and thinned
page.py      the data of a run folder; the file: parts put together, escaped, written whole; the trainer's reports,
             written on a separate thread
assets/      the page's own markup, style and scripts; uplot/ the chart library

Text of a rollout is only data to this page: it is stored as JSON without any "<", becomes text nodes only, and a
Content-Security-Policy allows only the page's own scripts, by their hashes.

Left out on purpose: a server, live updates (a trainer rewrites the file), anything that changes a run.
"""
