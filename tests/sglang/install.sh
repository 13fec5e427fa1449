#!/usr/bin/env bash
# Install the real SGLang for a CPU without CUDA or AMX into a virtual environment of its own: install.sh VENV
# About 3 GB and ten minutes the first time; nothing to do the next. x86-64 Linux, Python 3.11 or newer.
set -euo pipefail

venv=${1:?usage: install.sh VENV}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
state=$(cd "$here" && find install.sh requirements.txt stand_ins -name __pycache__ -prune -o -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum)

if [[ -f $venv/.installed && $(<"$venv/.installed") == "$state" ]]; then
  exit 0
fi

python3 -m venv "$venv"
"$venv/bin/pip" install --quiet torch==2.13.0
# Without dependencies: SGLang's own list asks for CUDA packages that cannot be installed or used here.
"$venv/bin/pip" install --quiet --no-deps --requirement "$here/requirements.txt"

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$here"/stand_ins/. "$site/"
echo "import torchvision_operators" >"$site/torchvision_operators.pth"

"$venv/bin/python" -c 'import sglang, torchvision; print("sglang", sglang.__version__, "is installed")'
echo "$state" >"$venv/.installed"
