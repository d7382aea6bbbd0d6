#!/bin/sh
# Runs NVIDIA's compute-sanitizer over a few small tests of the Triton kernels: memcheck, then racecheck.
#
#     sh benchmarks/sanitize.sh [SECONDS_PER_TOOL]      # on a GPU, from the repository's root; 240 without a number
#
# Small shapes, since racecheck slows kernels by some hundred times: every kernel, both branches of expand, splits and
# chunks, projections with adapters of their own, dropout. Ends with 1 when a tool finds an error or runs out of time.
set -u
limit="${1:-240}"
python="${PYTHON:-python}"
sanitizer="${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}"
tests="test_small_cases or test_split_reduction or test_projections_with_adapters_of_their_own or test_adamw"
file=tests/kernels/test_triton_kernels.py

# Torch's own kernels are left out where the sanitizer can tell kernels apart; the option's name changed over time.
only=""
for option in --kernel-regex --filter; do
    if "$sanitizer" --help | grep -q -e "$option"; then
        for kernel in shrink expand outer add_splits add_chunks square_sums norms adamw; do
            only="$only $option kns=${kernel}_kernel"
        done
        break
    fi
done

run_tests() {
    "$@" "$python" -m pytest --noconftest -q -p no:cacheprovider -m gpu -k "$tests" "$file"
}

# Compiled beforehand, so that the sanitizers' time goes to kernels; torch's pool would hide reads past a tensor.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$(mktemp -d)}"
run_tests || exit 1
result=0
for tool in memcheck racecheck; do
    echo "== $tool, $limit seconds at most"
    # shellcheck disable=SC2086  # several words
    run_tests timeout "$limit" "$sanitizer" --tool "$tool" --error-exitcode 9 $only
    status=$?
    case $status in
        0) echo "== $tool: no errors" ;;
        124) echo "== $tool: did not end in $limit seconds"; result=1 ;;
        *) echo "== $tool: status $status"; result=1 ;;
    esac
done
exit $result
