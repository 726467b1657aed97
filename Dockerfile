# pypcd on the CPU. Without arguments it serves the included model:
#
#     docker build --tag pypcd .
#     docker run --rm -p 127.0.0.1:8080:8080 pypcd
#
# docs/install.md says more. The wheels are built in one stage and installed in another, without compilers.

FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# ggml for any x86-64 CPU with AVX2 (or any 64-bit ARM), in place of this one's
ENV CMAKE_ARGS="-DGGML_NATIVE=OFF -DCMAKE_PROJECT_llama_cpp_INCLUDE=/src/cmake/llama-cpp-python.cmake" \
    PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# first what changes seldom: llama-cpp-python, of the version that pyproject.toml pins
COPY pyproject.toml ./
COPY cmake cmake
RUN sed -n '/^\(native-\)\{0,1\}requires = /{s/.*\[//;s/\].*//;s/[" ]//g;s/,/\n/g;p}' pyproject.toml > /requires.txt \
    && pip wheel --wheel-dir /wheels --requirement /requires.txt cmake ninja \
    && pip install --no-index --find-links /wheels --requirement /requires.txt cmake ninja
COPY . .
RUN pip wheel --no-build-isolation --find-links /wheels --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
# The wheels hold each library of ggml six times, where a link would do; and nobody here compiles against it.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --root-user-action=ignore --no-index --find-links /wheels llama-pcd \
    && cd /usr/local/lib/python3.12/site-packages \
    && rm -r include lib llama_cpp/lib/*.so.*.* \
    && for file in llama_cpp/lib/*.so; do ln -sf "${file##*/}.0" "$file"; done
RUN useradd --create-home --uid 10001 pypcd
USER 10001
WORKDIR /home/pypcd
EXPOSE 8080
HEALTHCHECK --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health')"]
# 0.0.0.0 is the container's own address: who can reach it is decided by -p
ENTRYPOINT ["pypcd"]
CMD ["serve", "demo", "--host", "0.0.0.0"]
