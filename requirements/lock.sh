#!/usr/bin/env bash
# Writes the lock files: every package that `make setup` and `make test` install, at one exact version, for each Python.
# Versions already locked stay unless they no longer fit; `requirements/lock.sh --upgrade` moves all to the newest.
set -euo pipefail
cd "$(dirname "$0")/.."

UV=${UV:-.venv/bin/uv}
# The CUDA libraries that Linux builds of torch bring are left out: torch's wheel pins them itself, and its CPU build
# (which the tests are happy with) has none.
CUDA='^(cuda|nvidia)-|^triton=='

for python in 3.11 3.12; do
    test_lock=requirements/test-py$python.lock
    train_lock=requirements/train-py$python.lock
    options=(--quiet --no-header --no-annotate --python-version "$python" "$@")
    # The larger set first: the smaller one is then cut to the same versions.
    "$UV" pip compile "${options[@]}" --extra=test setup.py requirements/build.in -o "$test_lock"
    grep -v -E "$CUDA" "$test_lock" > "$test_lock.tmp" && mv "$test_lock.tmp" "$test_lock"
    "$UV" pip compile "${options[@]}" --extra=train setup.py requirements/build.in -c "$test_lock" -o "$train_lock"
    # Of [plan] only what goes into a folder of its own; `requests`, which jax[tpu] asks for too, is for TPUs that are there.
    "$UV" pip compile "${options[@]}" --extra=plan setup.py requirements/build.in -c "$test_lock" \
        | grep '^libtpu==' > "requirements/plan-py$python.lock"
    jax=$(sed -n 's/^jax==//p' "$test_lock")
    echo "jax-cuda12-plugin[with-cuda]==$jax" | "$UV" pip compile "${options[@]}" - \
        > "requirements/plan-gpu-py$python.lock"
done

# gem takes no Python 3.12. Of TRL the source alone is read: what it would bring is torch and a trainer.
options=(--quiet --no-header --no-annotate --python-version 3.11 "$@")
adapters_lock=requirements/adapters-py3.11.lock
"$UV" pip compile "${options[@]}" --extra=gateway setup.py requirements/adapters.in \
    -c <(sed -n '/^transformers==/p' requirements/test-py3.11.lock) -o "$adapters_lock"
echo trl | "$UV" pip compile "${options[@]}" --no-deps - >> "$adapters_lock"

# The cookbook asks for a tml-renderers that PyPI does not have; its programs for other models do without.
tinker_lock=requirements/tinker-py3.11.lock
"$UV" pip compile "${options[@]}" requirements/tinker.in --override <(echo tml-renderers) \
    -c <(grep -E '^(torch|transformers|datasets)==' requirements/test-py3.11.lock) -o "$tinker_lock"
grep -v -E "$CUDA" "$tinker_lock" > "$tinker_lock.tmp" && mv "$tinker_lock.tmp" "$tinker_lock"
