"""What runs where the model is: from the tensors that pass in one batch to sums that are small enough to travel.

These functions are shipped to a server that has torch and nnsight and nothing of this library. They travel as source, so
that client and server may run different Pythons; what does not survive that is not used here: imports of this library,
decorators, classes, dataclasses. Values are plain dicts, lists, numbers and tensors.

The sums are those of ``recording.moments``, ``recording.sketch`` and ``recording.receivers``, which join them again.
"""

import torch

# Long float32 sums drift; products are taken over at most this many rows before they join the float64 sums.
ROWS_A_PRODUCT = 2048
WATCHED_POSITIONS = 16


def batch_sums(model, request, batch):
    """The sums of one batch, read while the model runs on it; inside a trace.

    ``request["places"]`` are in the order in which the model reaches them; nnsight serves them in no other.
    """
    sums, inputs, starts = {}, {}, []
    for place in request["places"]:
        tensor = passing_tensor(model, place)
        if place["starts_gradients"] and request["gradients"]:
            tensor = with_gradients(model, place, tensor)
            starts.append(tensor)
        for duty in place["duties"]:
            attend(duty, tensor, batch, request, sums, inputs)
    if request["gradients"]:
        loss, targets = summed_loss(model.output.logits, batch["targets"])
        # Whoever holds the weights has them frozen: gradients are asked of the embedding, and come by every place.
        torch.autograd.grad(loss, starts)
        sums["loss"] = {"kind": "sum", "loss": loss.detach().double().cpu(), "targets": torch.tensor(targets)}
    sums["facts"] = {"kind": "facts", "dtype": str(tensor.dtype)}
    return sums


def passing_tensor(model, place):
    """The tensor that passes a place, as nnsight serves it."""
    envoy = envoy_at(model, place["path"])
    if place["side"] == "output":
        value = envoy.output
    else:
        positional, named = envoy.inputs
        value = named[place["argument"]] if place["argument"] in named else positional[0]
    return value[0] if isinstance(value, (tuple, list)) else value


def with_gradients(model, place, tensor):
    """Where no gradient would come: the same numbers, asking for one. A copy, since the model may write into them."""
    asking = tensor.detach().requires_grad_(True).clone()
    envoy_at(model, place["path"]).output = asking
    return asking


def envoy_at(model, path):
    """The envoy of a module. By its path: attributes may be renamed, or mean another thing (BERT has a module ``output``)."""
    envoy = model
    for step in path.split("."):
        envoy = next(child for child in envoy if child.path.split(".")[-1] == step)
    return envoy


def attend(duty, tensor, batch, request, sums, inputs):
    """Do one thing with the tensor that passes: now, or when its gradient comes."""
    kind, key, directions = duty["kind"], duty["key"], directions_named(request, duty["directions"])
    if not bool(batch["keep"].any()):
        return
    if kind == "activations":
        rows = chosen_rows(tensor.detach(), duty, batch)
        sums[key] = stream_sums(rows, directions)
        if duty["watch"]:
            sums[key + "/positions"] = position_sums(rows, batch)
        if batch["sampled"] is not None and bool(batch["sampled"].any()):
            sums[key + "/sample"] = {"kind": "rows", "rows": rows[batch["sampled"].to(rows.device)]}
    elif kind == "inputs":
        sums[key] = projected_sums(chosen_rows(tensor.detach(), duty, batch), directions)
    elif kind == "map input":
        inputs[key] = tensor.detach()
    elif kind == "gradients":

        def take_gradient(gradient):
            sums[key] = stream_sums(chosen_rows(gradient.detach(), duty, batch), directions)

        tensor.register_hook(take_gradient)
    elif kind == "map output":
        read, left = inputs.pop(key), None if duty["left"] is None else left_directions(duty["left"])
        if left is not None:
            sums[key + "/check"] = {"kind": "facts", "sum": float(left.sum())}

        def take_signal(signal):
            rows = chosen_rows(read.to(signal.device), {"columns": None}, batch)
            sums[key] = weight_sums(rows, chosen_rows(signal.detach(), duty, batch), directions, left)

        tensor.register_hook(take_signal)


def directions_named(request, names):
    """The matrices of these names side by side; None where there is no name."""
    return torch.cat([request["directions"][name] for name in names], dim=1) if names else None


def left_directions(recipe):
    """The same numbers as the client draws, which would be too many to send: standard normal rows, and one of ones."""
    generator = torch.Generator().manual_seed(recipe["number"])
    drawn = torch.randn(recipe["out"], recipe["rows"], generator=generator, dtype=torch.float64)
    return torch.cat([drawn.T, torch.ones(1, recipe["out"], dtype=torch.float64)])


def chosen_rows(tensor, duty, batch):
    """The kept rows (n, width) in float32 or wider, and of a fused tensor the site's own columns only."""
    if duty["columns"] is not None:
        tensor = tensor[..., duty["columns"].to(tensor.device)]
    rows = tensor[batch["keep"].to(tensor.device)]
    return rows if rows.dtype == torch.float64 else rows.float()


def stream_sums(rows, directions):
    """Count, mean and centred second moment of rows; of the latter only its products with ``directions``, if given."""
    # A server runs everything under autocast, where products of float32 rows would be taken in half precision.
    with torch.autocast(rows.device.type, enabled=False):
        return centred_sums(rows, directions)


def centred_sums(rows, directions):
    """As :func:`stream_sums`, in the precision of the rows."""
    total = None
    for chunk in rows.split(ROWS_A_PRODUCT):
        # Squares of float32 numbers this small would vanish.
        chunk = chunk.double() if float(torch.linalg.vector_norm(chunk)) < 1e-12 else chunk
        centre = chunk.mean(dim=0)
        centred = chunk - centre
        # The mean was rounded to the rows' precision; what it left over is small, and is carried on in float64.
        left_over = centred.sum(dim=0).double() / len(chunk)
        part = {"count": len(chunk), "mean": centre.double() + left_over}
        if directions is None:
            part["kind"] = "moments"
            part["scatter"] = (centred.T @ centred).double()
            part["scatter"].addr_(left_over, left_over, alpha=-len(chunk))
        else:
            part["kind"] = "sketch"
            through = directions.to(device=rows.device, dtype=chunk.dtype)
            part["through"] = (centred.T @ (centred @ through)).double()
            part["diagonal"] = centred.square().sum(dim=0).double()
        total = part if total is None else joined_streams(total, part, directions)
    return total


def joined_streams(one, other, directions):
    """The sums of both streams of rows together (Chan, Golub, LeVeque 1983)."""
    count = one["count"] + other["count"]
    step = (other["mean"] - one["mean"]).double()
    weight = one["count"] * other["count"] / count
    found = {"kind": one["kind"], "count": count, "mean": one["mean"] + step * (other["count"] / count)}
    if one["kind"] == "moments":
        found["scatter"] = one["scatter"] + other["scatter"]
        found["scatter"].addr_(step, step, alpha=weight)
    else:
        through = directions.to(device=step.device, dtype=torch.float64)
        found["through"] = one["through"] + other["through"]
        found["through"].addr_(step, step @ through, alpha=weight)
        found["diagonal"] = one["diagonal"] + other["diagonal"] + weight * step.square()
    return found


def position_sums(rows, batch):
    """Count, sum and squared lengths of the rows at each of the first positions."""
    positions = batch["positions"][batch["keep"]].to(rows.device)
    early = positions < WATCHED_POSITIONS
    rows, places = rows[early].double(), positions[early]
    count = torch.zeros(WATCHED_POSITIONS, dtype=torch.float64, device=rows.device)
    total = torch.zeros(WATCHED_POSITIONS, rows.shape[1], dtype=torch.float64, device=rows.device)
    squares = torch.zeros(WATCHED_POSITIONS, dtype=torch.float64, device=rows.device)
    count.index_add_(0, places, torch.ones(len(places), dtype=torch.float64, device=rows.device))
    total.index_add_(0, places, rows)
    squares.index_add_(0, places, rows.square().sum(dim=1))
    return {"kind": "sum", "count": count, "sum": total, "square_sum": squares}


def projected_sums(rows, basis):
    """Count, sum, squared length, and squared length along a basis."""
    basis = basis.to(device=rows.device, dtype=rows.dtype)
    with torch.autocast(rows.device.type, enabled=False):
        along = (rows @ basis).double().square().sum()
    return {
        "kind": "sum",
        "count": torch.tensor(len(rows)),
        "sum": rows.double().sum(dim=0),
        "total": rows.double().square().sum(),
        "along": along,
    }


def weight_sums(rows, signals, directions=None, left=None):
    """G = sum of delta_i u_i^T, or G times directions and ``left`` times G; and the sums of delta and of its squares."""
    found = {
        "kind": "sum",
        "rows": torch.tensor(len(rows)),
        "signal_sum": signals.sum(dim=0).double(),
        "signal_square_sum": signals.double().square().sum(dim=0),
    }
    with torch.autocast(rows.device.type, enabled=False):
        if directions is None:
            return {**found, "gradient": sum_of_products(signals, rows)}
        found["through"] = sum_of_products(signals, rows @ directions.to(device=rows.device, dtype=rows.dtype))
        if left is not None:
            found["left"] = sum_of_products(signals @ left.to(device=rows.device, dtype=rows.dtype).T, rows)
    return found


def sum_of_products(signals, rows):
    """Sum of the outer products of these rows, in float64."""
    total = torch.zeros(signals.shape[1], rows.shape[1], dtype=torch.float64, device=rows.device)
    for delta, u in zip(signals.split(ROWS_A_PRODUCT), rows.split(ROWS_A_PRODUCT), strict=True):
        total += delta.T @ u
    return total


def summed_loss(logits, targets):
    """Negative log-likelihood of the targets in nats, summed; -100 marks what is no target."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    flat = targets.flatten().to(logits.device)
    loss = torch.nn.functional.cross_entropy(wide.flatten(0, 1), flat, ignore_index=-100, reduction="sum")
    return loss, int((flat != -100).sum())


def joined(one, other, request):
    """The sums of two sets of batches together."""
    found = {}
    for key in {**one, **other}:
        if key not in one or key not in other:
            found[key] = one.get(key, other.get(key))
        elif one[key]["kind"] == "facts":
            found[key] = one[key]
        elif one[key]["kind"] == "rows":
            rows = one[key]["rows"]
            found[key] = {"kind": "rows", "rows": torch.cat([rows, other[key]["rows"].to(rows.device)])}
        elif one[key]["kind"] == "sum":
            found[key] = {
                name: value if name == "kind" else value + other[key][name].to(value.device)
                for name, value in one[key].items()
            }
        else:
            directions = directions_named(request, request["directions_of"].get(key))
            moved = {
                name: value.to(one[key]["mean"].device) if hasattr(value, "to") else value
                for name, value in other[key].items()
            }
            found[key] = joined_streams(one[key], moved, directions)
    return found


def packed(sums):
    """As little as can travel: scaled float32, and one triangle of what is symmetric."""
    found = {}
    for key, one in sums.items():
        found[key] = {}
        for name, value in one.items():
            if not hasattr(value, "dim") or value.dim() < 2 or name == "rows":
                found[key][name] = value.cpu() if hasattr(value, "dim") else value
                continue
            scale = float(value.abs().max()) or 1.0
            if name == "scatter":
                rows, columns = torch.triu_indices(value.shape[0], value.shape[1], device=value.device)
                found[key]["width"] = value.shape[0]
                value = value[rows, columns]
            found[key][name] = (value / scale).float().cpu()
            found[key][name + "_scale"] = scale
    return found


def unpacked(sums):
    """The inverse of :func:`packed`, in float64."""
    found = {}
    for key, one in sums.items():
        found[key] = {}
        for name, value in one.items():
            if name.endswith("_scale") or name == "width":
                continue
            scale = one.get(name + "_scale")
            if scale is not None:
                value = value.double() * scale
            if name == "scatter":
                whole = torch.zeros(one["width"], one["width"], dtype=torch.float64)
                rows, columns = torch.triu_indices(one["width"], one["width"])
                whole[rows, columns] = value
                whole[columns, rows] = value
                value = whole
            found[key][name] = value
    return found
