/*
  moe_route.h: the Mixture-of-Experts layer at decode time on NVIDIA GPUs, from router logits to the combined output.
  One header, no nvcc: the CUDA kernels are carried as text, compiled for the exact model by NVRTC on first use, kept on
  disk, and launched through the driver API. SM80 to SM120; a CPU backend with the same API runs everywhere.

  Version 0.1.0. SPDX-License-Identifier: MIT (the text stands at the end of this file).

  Use: in ONE source file

      #define MOE_ROUTE_IMPLEMENTATION
      #include "moe_route.h"

  and a plain #include "moe_route.h" wherever else it is used. C99, C11 or C++11 and newer; no CUDA header is needed, and
  cuda.h or cuda_runtime.h beside it do no harm. Link with -lm, and with -ldl -lpthread where the C library keeps these
  apart (glibc before 2.34).

  This file is made from the project's src/ and kernels_src/; change those, not this.
*/
