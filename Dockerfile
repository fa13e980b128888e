# The official image of the pinned release, with the series applied in place: no build, no second copy of the
# extensions. The default is held equal to upstream.toml by tests/fork/test_dockerfile.py.
ARG RELEASE=0.33.0
FROM vllm/vllm-openai:v${RELEASE}

WORKDIR /opt/vllm-ampere
COPY upstream.toml LICENSE ./
COPY fork ./fork
COPY patches ./patches
COPY vllm ./vllm

# All but ast-grep are in the image already; named, so that this step is complete by itself.
RUN python3 -m pip install --no-cache-dir "ast-grep-cli>=0.51" packaging pyyaml tqdm
RUN python3 -m fork apply --installed

# The working directory of the base image; the entry point stays its `vllm serve`.
WORKDIR /vllm-workspace
