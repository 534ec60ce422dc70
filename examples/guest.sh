#!/usr/bin/env bash
# A guest beside the production engine of slot0: stock vLLM with the coserve scheduler, in the idle
# scheduling class. Usage: examples/guest.sh MODEL_DIRECTORY [more vLLM flags]
#
# The idle class counts within one scheduling group only: start both engines in one session, or give
# the guest's service or container an idle control group (systemd: CPUWeight=idle).
# Same user as the agent. The weights come from the store; the model directory needs only its
# configuration and tokenizer. On a CPU add --enforce-eager --dtype bfloat16, TORCHDYNAMO_DISABLE=1 (vLLM
# otherwise compiles for 20 s of production's core at the first request for log-probabilities) and
# VLLM_ENABLE_V1_MULTIPROCESSING=0 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind (else its worker spins).
# vLLM wants 0.92 of all memory at first: --gpu-memory-utilization 0.1 and VLLM_CPU_KVCACHE_SPACE=1 are enough for a trial.
# Before vLLM 0.30 leave --enable-scale-out out. The development routes (VLLM_SERVER_DEV_MODE) must stay on loopback.
set -euo pipefail

export ROSEMUX_ROLE=guest ROSEMUX_ENGINE=guest ROSEMUX_PAGE_DIR=/run/rosemux/slot0
export ROSEMUX_WEIGHT_ROOT=/srv/weights VLLM_SERVER_DEV_MODE=1 ROSEMUX_ISOLATION=idle

exec chrt --idle 0 python -m vllm.entrypoints.openai.api_server \
    --model "${1:?usage: examples/guest.sh MODEL_DIRECTORY [more vLLM flags]}" "${@:2}" \
    --host 127.0.0.1 --port 8001 \
    --scheduler-cls coserve.vllm.scheduler.CoserveScheduler \
    --middleware coserve.vllm.middleware.EpochMiddleware \
    --middleware coserve.vllm.identity.IdentityMiddleware \
    --worker-extension-cls coserve.vllm.kv_worker.KvPages \
    --weight-transfer-config '{"backend": "rosemux"}' \
    --load-format dummy \
    --enable-scale-out \
    --stream-interval 1 \
    --logprobs-mode processed_logprobs
