"""scalerl-report: shows a run, or several side by side, in one HTML file that needs no network.

    scalerl-report runs/quickstart                          writes runs/quickstart/report.html
    scalerl-report runs/a runs/b --out=compared.html        one page with both: curves overlaid, a table of differences

A trainer writes the first kind itself, at each evaluation and at its end. The file is written whole or not at all; a
folder that holds no run ends the command with one line and exit code 2.
"""

import os
from collections.abc import Sequence

from absl import flags

from scalerl_jax.cli import command_flags
from scalerl_jax.cli.entry import UserError, check_out, run_command, user_mistakes
from scalerl_jax.system import platforms


def report(workdirs: Sequence[str], out: str | None) -> str:
    """Writes the page of these runs to the file (or into the folder) `out`; returns its path. Raises UserError."""
    if not workdirs:
        raise UserError("no run folder given, for example: scalerl-report runs/quickstart")
    if out is None and len(workdirs) > 1:
        raise UserError(f"--out: no file given for the page of {len(workdirs)} runs")
    seen: set[str] = set()
    for workdir in workdirs:
        if not os.path.isdir(workdir):
            raise UserError(f"{workdir}: no such folder")
        if os.path.realpath(workdir) in seen:
            raise UserError(f"{workdir}: is given twice")
        seen.add(os.path.realpath(workdir))
    from scalerl_jax.report.page import FILE, write_report  # it takes seconds

    if out is not None and (os.path.isdir(out) or out.endswith(os.sep)):
        out = os.path.join(out, FILE)
    check_out("--out", out or workdirs[0])
    with user_mistakes():
        try:
            if out is not None:
                os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
            return write_report(workdirs, out)
        except OSError as error:
            raise UserError(f"{error.filename or out}: {error.strerror}") from error


def run() -> None:
    command_flags.report()
    platforms.cpu_only()
    run_command(lambda workdirs: print(f"report: {report(workdirs, flags.FLAGS.out)}"))


if __name__ == "__main__":
    run()
