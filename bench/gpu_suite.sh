#!/usr/bin/env bash
# Everything that is measured on GPUs, in parts of a few minutes; the reports go where OUT says.
#
#   OUT=bench/results/h200 MODEL=~/.cache/minisgl/models/smollm2-135m bench/gpu_suite.sh check tests
#   OUT=bench/results/h200 bench/gpu_suite.sh tune kernels
#   OUT=bench/results/h200 bench/gpu_suite.sh engine
#   OUT=bench/results/h200 TRACE=mooncake.jsonl bench/gpu_suite.sh serve
#   OUT=bench/results/h200-x4 TP=4 bench/gpu_suite.sh tp
#   OUT=bench/results/h200-x4 TP=4 TRACE=mooncake.jsonl SERVE_MODEL=qwen3-32b REQUESTS=1000 bench/gpu_suite.sh serve
#
#   check    the engine and a server against transformers, on the built-in model in $MODEL      1.5 minutes
#   tests    the kernels' tests, on the GPU                                                      1 minute
#   tune     launch configurations of every kernel that changed, into the shipped table          2 minutes
#   kernels  every kernel over the shapes its speed is judged by, flashinfer beside it           4 minutes
#   engine   offline, step and start of three models with dummy weights                          6 minutes
#   soak     2,000 requests of random lengths: nothing compiled, no graph missing, no memory taken 1.5 minutes
#   backends attention backends: whether they agree, and offline with each                       4 minutes
#   families every family's logits against transformers, layers with windows, and linear attention  7 minutes
#   quantized steps and offline of FP8 and 4-bit models, FP8 cache, quantized experts            9 minutes
#   modes    compile modes, graphs and overlap against each other, in one process                2 minutes
#   serve    the trace in $TRACE against a server, with and without the prefix cache            15 minutes
#   tp       on $TP GPUs: sums over ranks into the shipped table, several ranks against one, the
#            loss of one, steps of large models, and of one model on 1, 2, ... $TP GPUs             8 minutes
#
# All but tp run on one GPU; serve takes TP of them. DEVICE=cpu TP=2 TP_MODELS=... tries tp out without a GPU.
# COMMIT names the code where there is no .git. A part that fails does not keep the others from running.
set -u
: "${OUT:?where the reports go}"
PYTHON=${PYTHON:-python3}
COMMIT=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
MODELS=${MODELS:-qwen3-0.6b llama-3.1-8b qwen3-14b}
SERVE_MODEL=${SERVE_MODEL:-qwen3-14b}
PORT=${PORT:-8077}
TP=${TP:-1}
TP_MODELS=${TP_MODELS:-llama-3.1-70b qwen3-32b}
SCALING_MODEL=${SCALING_MODEL:-llama-3.1-8b}
DEVICE=${DEVICE:-cuda}
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
failed=()

run() {
    echo "== $*"
    "$@" || failed+=("$*")
}

minisgl() { "$PYTHON" -m minisgl "$@"; }

check() {
    run "$PYTHON" bench/gpu_check.py --model "${MODEL:?the built-in model, see: minisgl pull smollm2-135m}" \
        --out "$OUT/gpu-check-smollm2-135m.json"
}

tests() {
    run "$PYTHON" -m pytest -q -p no:cacheprovider tests/triton_kernels --deselect \
        tests/triton_kernels/test_compilation.py
}

tune() {
    run minisgl tune --model all
}

kernels() {
    bench_kernel attention paged --baselines flashinfer
    bench_kernel sample 256x151936 1x151936 --model qwen3-8b --baselines none
    bench_kernel qwen3-30b-a3b fused_moe moe_route rope_store --model qwen3-30b-a3b --baselines none
    bench_kernel llama-3.1-8b norm _mul rope_store linear advance_rows --baselines flashinfer
    bench_kernel inductor "rms_norm 4096x" "silu_mul 4096x" "rope_store 4096x" "256x128256 top_p" \
        "linear 8x" "decode 256x1024" --baselines inductor
}

bench_kernel() {
    local name=$1
    shift
    run minisgl bench kernel "$@" --commit "$COMMIT" --out "$OUT/kernels-$name.json"
}

engine() {
    for model in $MODELS; do
        run minisgl bench offline --model "$model" --dummy-weights --max-context-tokens 4096 --rounds 2 \
            --commit "$COMMIT" --out "$OUT/offline-$model.json"
        run minisgl bench step --model "$model" --dummy-weights --max-context-tokens 8192 \
            --commit "$COMMIT" --out "$OUT/step-$model.json"
        run minisgl bench startup --model "$model" --dummy-weights --max-context-tokens 4096 --rounds 1 \
            --commit "$COMMIT" --out "$OUT/startup-$model.json"
    done
}

soak() {
    run "$PYTHON" bench/gpu_soak.py --model "${SOAK_MODEL:-llama-3.1-8b}" --dummy-weights \
        --max-context-tokens 8192 --commit "$COMMIT" --out "$OUT/soak-${SOAK_MODEL:-llama-3.1-8b}.json"
}

backends() {
    run "$PYTHON" bench/attention_backends.py --out "$OUT/attention-backends.json"
    for backend in triton flashinfer triton,flashinfer; do
        run minisgl bench offline --model llama-3.1-8b --dummy-weights --max-context-tokens 4096 --rounds 1 \
            --attention-backend "$backend" --commit "$COMMIT" --out "$OUT/offline-llama-3.1-8b-${backend/,/-}.json"
    done
}

families() {
    run "$PYTHON" bench/families.py --compile --out "$OUT/families.json"
    run "$PYTHON" bench/window_groups.py --out "$OUT/window-groups.json"
    bench_kernel gated-delta gated_delta --model qwen3.5-35b-a3b --baselines none
    for model in ${FAMILY_MODELS:-qwen3.5-35b-a3b gpt-oss-20b gemma-4-26b-a4b gemma-4-31b}; do
        run minisgl bench step --model "$model" --dummy-weights --max-context-tokens 8192 --batches 1,16,64 \
            --contexts 1024 --prefills 4096 --prefixes 0 --commit "$COMMIT" --out "$OUT/step-$model.json"
    done
}

quantized() {
    local points=(--batches 1,8,64,256 --contexts 1024 --prefills 128,8192 --prefixes 0 --max-context-tokens 8704)
    quantized_step bf16 "${points[@]}"
    quantized_step fp8 --quantization fp8 "${points[@]}"
    quantized_step fp8-kv --quantization fp8 --kv-dtype fp8 "${points[@]}"
    quantized_step fp8-block --quantization fp8-block "${points[@]}"
    quantized_step int4 --quantization int4 "${points[@]}"
    for model in llama-3.1-8b qwen3-14b; do
        run minisgl bench offline --model "$model" --dummy-weights --quantization fp8 --kv-dtype fp8 \
            --max-context-tokens 4096 --rounds 1 --commit "$COMMIT" --out "$OUT/offline-$model-fp8-kv.json"
    done
    run "$PYTHON" bench/quantized_experts.py --seconds 180 --out "$OUT/quantized-experts.json"
}

quantized_step() {
    local name=$1
    shift
    run minisgl bench step --model llama-3.1-8b --dummy-weights --commit "$COMMIT" \
        --out "$OUT/step-llama-3.1-8b-$name.json" "$@"
}

modes() {
    run "$PYTHON" bench/modes.py --model "${MODES_MODEL:-llama-3.1-8b}" --dummy-weights \
        --commit "$COMMIT" --out "$OUT/modes-${MODES_MODEL:-llama-3.1-8b}.json"
}

serve() {
    local folder server cache
    folder=$(mktemp -d)
    "$PYTHON" bench/dummy_model.py "$SERVE_MODEL" "$folder"
    for cache in prefix-cache no-prefix-cache; do
        "$PYTHON" -m minisgl serve --model "$folder" --dummy-weights --port "$PORT" --tp "$TP" "--$cache" \
            > "$OUT/server-$cache.log" 2>&1 &
        server=$!
        until curl -sf "http://127.0.0.1:$PORT/health" > /dev/null; do
            sleep 1
            kill -0 "$server" || { tail -20 "$OUT/server-$cache.log"; failed+=("the server"); continue 2; }
        done
        run minisgl bench serve --url "http://127.0.0.1:$PORT" --dataset "${TRACE:?a trace of Mooncake}" \
            --num-requests "${REQUESTS:-300}" --length-scale 1/8 --time-scale "${SCALES:-0.4,0.6,0.8,1.0,1.6}" \
            --temperature 1 --slo ttft:500,tpot:50 --commit "$COMMIT" --out "$OUT/serve-$SERVE_MODEL-$cache.json"
        kill "$server"
        wait "$server"
    done
    rm -r "$folder"
}

tp() {
    local model ranks large=1,64,256 small=1,64
    local points=(--contexts 1024 --prefills 128,2048 --prefixes 0)
    if [ "$DEVICE" = cpu ]; then
        large=1,2 small=1
        points=(--contexts 32 --prefills 16 --prefixes 0 --steps 3)
    fi
    if [ "$DEVICE" = cuda ]; then
        run "$PYTHON" bench/all_reduce.py --tp "$TP" --write --out "$OUT/all-reduce-tp$TP.json"
    fi
    run "$PYTHON" bench/tp_check.py --tp "$TP" --device "$DEVICE"
    for model in $TP_MODELS; do
        tp_step "$model" "$TP" "$large" "${points[@]}"
    done
    for ((ranks = 1; ranks <= TP; ranks *= 2)); do
        tp_step "$SCALING_MODEL" "$ranks" "$small" "${points[@]}"
    done
}

tp_step() {
    local model=$1 ranks=$2 batches=$3
    shift 3
    run minisgl bench step --model "$model" --dummy-weights --tp "$ranks" --device "$DEVICE" \
        --max-context-tokens 4096 --batches "$batches" "$@" \
        --commit "$COMMIT" --out "$OUT/step-$model-tp$ranks.json"
}

for part in "$@"; do
    case $part in
        check | tests | tune | kernels | engine | soak | backends | families | quantized | modes | serve | tp) "$part" ;;
        *) echo "no part is called $part; see the head of this file" >&2; exit 2 ;;
    esac
done
for command in ${failed[@]+"${failed[@]}"}; do echo "FAILED: $command" >&2; done
[ ${#failed[@]} -eq 0 ]
