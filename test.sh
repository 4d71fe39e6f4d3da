#!/usr/bin/env bash
# Installs what the tests need into .venv and runs all of them: style, types, tests. Works alone on a fresh machine.
#   ./test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
tools/setup_venv.sh demo test
bin=$(cd "${QUADS_VENV:-.venv}" && pwd)/bin
export HF_HUB_OFFLINE=1
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy" vllm_quads trainer_qat
# Files side by side: most of a test is one engine or one trainer on one core. Threads that wait must not spin then.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
exec "$bin/python" -m pytest -n 2 --dist loadfile "$@"
