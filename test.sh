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
exec "$bin/python" -m pytest "$@"
