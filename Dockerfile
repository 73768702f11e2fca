# A server for CPUs. For a GPU, begin from an image with CUDA and add the extra `cuda13`.
FROM python:3.13-slim

RUN apt-get update \
  && apt-get install --yes --no-install-recommends g++ \
  && rm -rf /var/lib/apt/lists/* \
  && useradd --create-home --uid 1000 ferrum
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY ferrum_jax ferrum_jax
RUN pip install --no-cache-dir ".[demo,serve]"
USER ferrum
WORKDIR /home/ferrum
# Mount points, which Docker would make as root's, parents included. A new volume takes their owner.
RUN mkdir -p .cache/ferrum_jax .cache/huggingface
EXPOSE 8000
# On the port that the command line of the first process names.
HEALTHCHECK --start-period=300s CMD ["python", "-c", "import re, urllib.request as r; own = re.search(r'--port[\\0=](\\d+)', open('/proc/1/cmdline').read()); r.urlopen(f'http://127.0.0.1:{own[1] if own else 8000}/health')"]
ENTRYPOINT ["ferrum-jax", "serve"]
CMD ["--host", "0.0.0.0"]
