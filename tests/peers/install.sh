#!/usr/bin/env bash
# SpecForge and speculators in a virtual environment of their own: tests/peers/install.sh FOLDER
#
# Both want other torch or transformers versions than eaglet and than each other, hence --no-deps; what they import
# on a CPU is listed by hand.  Does nothing where the folder has the versions already.
set -euo pipefail

folder=${1:?"usage: install.sh FOLDER"}
peers=(specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0 triton==3.9.0)
needed=(
  torch==2.13.0 transformers==5.19.0 datasets==5.0.0 accelerate safetensors requests httpx aiohttp openai
  openai-harmony loguru==0.7.3 pydantic pydantic-settings rich typer click psutil pyyaml protobuf tqdm pytest
)
wanted="${peers[*]} ${needed[*]}"

if [[ -f "$folder/.installed" && "$(<"$folder/.installed")" == "$wanted" ]]; then
  exit 0
fi
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check "${needed[@]}"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "${peers[@]}"
echo "$wanted" > "$folder/.installed"
