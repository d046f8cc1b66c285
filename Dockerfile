# The README's first command in a container; runs and caches stay in the volume:
#   docker build -t jaxlm .
#   docker run --rm -it -v jaxlm:/home/jaxlm jaxlm [train CONFIG …]
# For an accelerator: --build-arg PACKAGE='.[cuda]' or '.[tpu]'.
FROM python:3.12-slim

ARG PACKAGE=.
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /usr/src/jaxlm
COPY . .
RUN pip install "$PACKAGE"

RUN useradd --create-home jaxlm
USER jaxlm
WORKDIR /home/jaxlm
ENTRYPOINT ["jaxlm"]
CMD ["train", "quickstart"]
