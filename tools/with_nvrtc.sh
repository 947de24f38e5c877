#!/bin/sh
# with_nvrtc.sh PROGRAM: runs a program that needs NVRTC only when nothing is compiled yet. When it says with status 2 that
# there is none, fetches NVIDIA's pip package into build/nvrtc and runs it once more.
"$@"
status=$?
[ $status -eq 2 ] || exit $status
echo "Fetching NVRTC with pip into build/nvrtc ..."
python3 -m pip install --quiet --upgrade --target build/nvrtc nvidia-cuda-nvrtc-cu12 || exit 2
MOE_ROUTE_NVRTC_PATH=$(ls -d build/nvrtc/nvidia/*/lib | head -n 1) exec "$@"
