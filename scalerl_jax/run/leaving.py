"""What is said where a run ends because its folder cannot be written to any more."""

import contextlib
import os
from collections.abc import Iterator

from scalerl_jax.cli.entry import UserError
from scalerl_jax.learner.checkpoint import newest_step
from scalerl_jax.system import files


@contextlib.contextmanager
def told_where_it_goes_on(workdir: str) -> Iterator[None]:
    """Around a run: a folder that cannot be written to any more ends it with one line (UserError)."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, files.WriteError) and error.filename is None:
            raise
        raise UserError(_where_it_goes_on(workdir, error)) from error


def _where_it_goes_on(workdir: str, error: OSError) -> str:
    folder, file = os.path.abspath(workdir), os.path.abspath(str(error.filename))
    inside = file.startswith(folder + os.sep)
    what = f"--workdir={workdir}" if inside or file == folder else file
    what = f"{what}: {files.reason(error)}" + (f" ({os.path.relpath(file, folder)})" if inside else "")
    if not os.path.isdir(folder):
        return f"--workdir={workdir}: the folder was deleted or moved while the run wrote to it"
    step = newest_step(os.path.join(folder, "checkpoints"))
    goes_on = f"the run goes on from step {step}" if step is not None else "the run begins again"
    when = "there is room" if error.errno in files.FULL else "that is mended"
    return f"{what}; {goes_on} with the same command when {when}"
