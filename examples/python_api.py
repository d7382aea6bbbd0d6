"""Tune from Python: the same steps as `alto validate`, `alto tune` and `alto report`.

python examples/python_api.py examples/quickstart.yaml
"""

import sys

from flows.api import build_report, leaderboard, load_settings, load_task, plan_task, tune


def main(file: str) -> None:
    task = load_task(file)
    plan = plan_task(task)  # reads data and model configuration, loads no weights
    print(f"{len(plan.jobs)} jobs, {plan.num_tokens} tokens")

    result = tune(task)
    print(leaderboard(result.task_id)[["place", "job_id", "state", "best_val_loss"]].to_string(index=False))
    for score in result.scores:
        print(score.split, score.job_id or "untuned model", f"{score.loss:.3f}", score.metric_value)
    print(f"{result.winner}: {result.adapter_folder}, registered as {result.registered}")
    print(build_report(result.task_id, load_settings()))


if __name__ == "__main__":
    main(sys.argv[1])
