"""scalerl-export: writes the policy of a run as a Hugging Face folder, which transformers and vLLM load.

    scalerl-export --workdir=runs/quickstart --out=exported [--dtype=float32|bfloat16] [--model=DIR]
        [--merge|--adapter]

Only the parameters are read, from the newest complete checkpoint; a running trainer is not disturbed. The weights are
written in the dtype that the generators sample with (config.model.sync_dtype), so the folder is the policy that was
trained and evaluated, unless --dtype says otherwise. The tokenizer is that of the model the run started from; --model
says where that is, if it has moved.

For a run with an adapter (config.lora) the folder is the merged policy, which --merge only states; with --adapter it is
the adapter alone, in float32 and in PEFT's form.
"""

import os

from absl import flags

from scalerl_jax.cli import command_flags, entry
from scalerl_jax.model.decoder_config import read_config
from scalerl_jax.system import platforms


def export(
    *, workdir: str, out: str, dtype: str = "", model: str = "", adapter: bool = False, merge: bool = False
) -> int:
    """Writes the folder `out`, whole or not at all; returns the step of the checkpoint it holds.

    dtype "": the run's sync dtype; model "": the run's config.model.path; adapter: without the policy that it adapts;
    merge: only if there is one.
    Raises entry.UserError, one line, if something is missing or unreadable, or if `out` exists.
    """
    if os.path.exists(out):
        raise entry.UserError(f"--out={out}: exists already")
    entry.check_out("--out", out)
    config = entry.config_of_run(workdir)
    if merge and adapter:
        raise entry.UserError("--merge: makes another folder than --adapter: give one of the two")
    if (merge or adapter) and not config.lora.rank:
        asked = "--adapter" if adapter else "--merge"
        raise entry.UserError(f"{asked}: the run in {workdir} has no adapter, config.lora.rank is 0")
    with entry.user_mistakes():
        # A warm start has no model.path, and no checkpoint of its end; the config of a run names its model, too.
        made = os.path.join(workdir, "model")
        if not config.model.path and os.path.isdir(made) and not os.path.exists(f"{made}.outdated"):
            beside = f", and its adapter {os.path.join(workdir, 'adapter')}" if config.lora.rank else ""
            raise entry.UserError(
                f"--workdir={workdir}: config.model.path is empty there, as in a warm start's folder, whose policy is "
                f"{made} already{beside}"
            )
        model = model or config.model.path or (config.sft.model_path if config.lora.rank else "")
        if not model:
            raise entry.UserError(
                f"--workdir={workdir}: config.model.path is empty there; --model says where the start model is"
            )
        if not os.path.isdir(model):
            raise entry.UserError(f"{model}: the model the run started from is not there; --model says where it is")
        decoder = read_config(model)
        # Orbax and jax, which take seconds: by now wrong flags have been reported.
        from scalerl_jax.learner.checkpoint import read_newest
        from scalerl_jax.learner.make_trainer import lora_of, policy_of
        from scalerl_jax.model.hf_folder import write_model_folder
        from scalerl_jax.model.lora import BASE, write_adapter

        checkpoint = read_newest(os.path.join(workdir, "checkpoints"), "params")
        if adapter:
            lora, base = lora_of(config, decoder), checkpoint.manifest[BASE]
            assert lora is not None
            write_adapter(out, checkpoint.state["params"], lora, model=os.path.abspath(model), base=base)
        else:
            params = policy_of(checkpoint, config, decoder, model=model)
            dtype = dtype or config.model.sync_dtype
            write_model_folder(out, params=params, decoder=decoder, tokenizer_dir=model, dtype=dtype)
    return checkpoint.step


def run() -> None:
    command_flags.export()
    platforms.cpu_only()
    entry.run_command(_main)


def _main(arguments: list[str]) -> None:
    entry.without_arguments(_export)(arguments)


def _export() -> None:
    values = flags.FLAGS
    if values.adapter and values.dtype:
        raise entry.UserError(f"--dtype={values.dtype}: is for whole weights; an adapter is written as it is trained")
    step = export(
        workdir=values.workdir,
        out=values.out,
        dtype=values.dtype,
        model=values.model,
        adapter=values.adapter,
        merge=values.merge,
    )
    print(f"{values.out}: the {'adapter' if values.adapter else 'policy'} after {step} batches")


if __name__ == "__main__":
    run()
