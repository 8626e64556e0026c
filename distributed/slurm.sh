#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:1
#SBATCH --time=01:00:00
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --open-mode=append

cd "$SLURM_SUBMIT_DIR" || exit 2
source .venv/bin/activate || exit 2
for attempt in $(seq 20); do
    srun --kill-on-bad-exit=1 python -m distributed.main \
        --data_dir=mnist --output_dir=output \
        --micro_batch_size=50 --watchdog_secs=300
    code=$?
    case "$code" in
        0 | 2 | 143) exit "$code" ;;
    esac
    echo "attempt $attempt ended with $code" >&2
done
exit 1
