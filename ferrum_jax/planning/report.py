"""A plan in words: what `ferrum-jax plan` prints."""

from ferrum_jax.planning.estimate import Estimate, StepTime, show_bytes


def describe(found: Estimate) -> dict[str, str]:
    """Returns the lines of a report, by what they tell."""
    at, machine = found.deployment, found.deployment.machine
    taken = sum(found.parameters.values())
    kinds = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in found.parameters.items())
    temporaries = "not lowered" if found.temporary_bytes is None else show_bytes(found.temporary_bytes)
    # of a GPU, JAX takes 75 % unless this says otherwise
    reserved = f"; set XLA_PYTHON_CLIENT_MEM_FRACTION={at.memory_share:g}" if machine.platform == "gpu" else ""
    lines = {
        "model": f"{at.subject.name}, weights in {at.subject.weights}, activations in {at.subject.dtype}",
        "devices": f"{at.data * at.devices} x {machine.name}, {at.mesh}; {show_bytes(found.usable_bytes)} of "
        f"{show_bytes(machine.memory_bytes)} usable, {machine.memory_rate / 1e12:.2f} TB/s, "
        f"{machine.bf16_rate / 1e12:,.0f} TFLOP/s{reserved}",
        "parameters": f"{show_bytes(taken)} a device: {kinds}",
        "temporaries": f"{temporaries} a device",
        "KV": f"{show_bytes(found.kv_bytes_per_sequence)} a device for each sequence of {at.context:,} positions "
        f"({found.kv_bytes_per_sequence / at.context:,.0f} bytes a position)",
        "sequences": f"{at.data * found.sequences:,} fit, {at.data * found.rows:,} in the decode step below",
    }
    if at.devices > 1:
        link = machine.link(at.devices)
        lines["interconnect"] = f"{link.name}, {link.bandwidth / 1e9:,.0f} GB/s a device in each direction"
        for one in found.decode.collectives:
            lines[f"{one.kind}, {one.what}"] = f"{one.count} of {show_bytes(one.num_bytes)} in a decode step"
    lines["decode step"] = _step(found.decode, at.data)
    lines["prompt step"] = _step(found.prompt, at.data)
    return lines


def _step(step: StepTime, replicas: int) -> str:
    figures = step.summary(replicas)
    return (
        f"at least {figures['step_ms']:.2f} ms for {figures['tokens']:,} tokens of a replica, at most "
        f"{figures['tokens_per_second']:,.0f} tokens/s in all: products {figures['product_ms']:.2f} ms, memory "
        f"{figures['memory_ms']:.2f} ms, collectives {figures['collective_ms']:.2f} ms; limited by {figures['limit']}"
    )
