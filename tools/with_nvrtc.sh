#!/bin/sh
# with_nvrtc.sh [-s STATUS] PROGRAM...: runs a program that needs NVRTC only when nothing is compiled yet. When it says with
# this status, 2 without -s, that there is none, fetches NVIDIA's pip package into build/nvrtc and runs it once more.
missing=2
if [ "$1" = -s ]; then
    missing=$2
    shift 2
fi
"$@"
status=$?
[ $status -eq "$missing" ] || exit $status
echo "Fetching NVRTC with pip into build/nvrtc ..."
python3 -m pip install --quiet --upgrade --target build/nvrtc nvidia-cuda-nvrtc-cu12 || exit $status
MOE_ROUTE_NVRTC_PATH=$(ls -d build/nvrtc/nvidia/*/lib | head -n 1) exec "$@"
