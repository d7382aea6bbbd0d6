"""Lower bounds: no plan can end earlier, whatever makes it."""

from __future__ import annotations

from alto_core.scheduling.instance import Instance, WaitingTask


def makespan_bound(instance: Instance) -> int:
    """The largest of four bounds.

    - Chain: the end of each running task, and release + duration of each waiting one.
    - Area: the GPU-seconds of tasks that only certain hosts can run, over the GPUs of these hosts.
    - Wide tasks: of tasks that need more than half of every host that they fit, two cannot share a host.
    - Stacks: of the longest `k * GPUs + 1` shares that tasks have in GPUs, `k + 1` follow each other on one GPU.
    """
    chain = [task.seconds for task in instance.running] + [task.release + task.seconds for task in instance.waiting]
    return max([*chain, area_bound(instance), _wide_bound(instance), _stack_bound(instance)], default=0)


def area_bound(instance: Instance) -> int:
    """The largest area bound over the sets of hosts that some task is confined to."""
    homes = {task.task_id: _homes(task, instance) for task in instance.waiting}
    bound = 0
    for hosts in {*homes.values(), frozenset(instance.host_by_id)}:
        area = sum(task.area for task in instance.waiting if homes[task.task_id] <= hosts)
        area += sum(task.seconds * len(task.gpus) for task in instance.running if task.host_id in hosts)
        num_gpus = sum(len(instance.host_by_id[host_id].gpus) for host_id in hosts)
        if num_gpus:
            bound = max(bound, -(-area // num_gpus))
    return bound


def _wide_bound(instance: Instance) -> int:
    widest = max((len(host.gpus) for host in instance.hosts), default=0)
    wide = sorted((task.seconds for task in instance.waiting if 2 * task.num_gpus > widest), reverse=True)
    num_hosts = sum(
        any(task.num_gpus <= len(host.gpus) for task in instance.waiting if 2 * task.num_gpus > widest)
        for host in instance.hosts
    )
    if not wide:
        return 0
    bound = -(-sum(wide) // num_hosts)
    if len(wide) > num_hosts:
        bound = max(bound, wide[num_hosts - 1] + wide[num_hosts])
    return bound


def _stack_bound(instance: Instance) -> int:
    num_gpus = sum(len(host.gpus) for host in instance.hosts)
    shares = [task.seconds for task in instance.waiting for _ in range(task.num_gpus)]
    shares += [task.seconds for task in instance.running for _ in task.gpus]
    shares.sort(reverse=True)
    bound = 0
    for height in range(1, (len(shares) - 1) // num_gpus + 1 if num_gpus else 1):
        stacked = height * num_gpus + 1
        bound = max(bound, sum(shares[stacked - height - 1 : stacked]))
    return bound


def _homes(task: WaitingTask, instance: Instance) -> frozenset[str]:
    return frozenset(host.host_id for host in instance.hosts if task.fits(host))
