"""The report of one or several runs as a page: one HTML file that opens anywhere and asks no network for anything.

score.py     evaluations, the fit, the forecast, the parts of a mixture
health.py    series of the updates, thinned, with their limits and alarms
time_line.py waits along the run, and for what; device-hours by role
samples.py   sampled completions to read, within a size
log_rows.py  rows of the logs, checked
run_data.py  a run folder as what the page shows of it
page.py      the file: parts put together, escaped, written whole
writer.py    the trainer's: pages from a thread of its own
assets/      the page's own markup, style and scripts; uplot/ the chart library

What a rollout says is data to this page: it travels as JSON in which no "<" is left, becomes text nodes only, and a
Content-Security-Policy lets nothing run but the page's own scripts, by their hashes.

Left out on purpose: a server, live updates (a trainer rewrites the file), anything that changes a run.
"""
