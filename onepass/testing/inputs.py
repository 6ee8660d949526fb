"""A call of attention with its arguments, which is compared with the float64 oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import onepass

from .. import reference
from ..geometry import philox
from .budget import Comparison, compare, compare_gradients, compare_lse
from .rounding import rounding_terms

WITH_GRADIENT = ("alibi_slopes", "bias")


@dataclass
class Call:
    """The arguments of one call: `tensors` (q, k, v) and `options`."""

    tensors: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None

    @property
    def is_packed(self) -> bool:
        return "cu_seqlens_q" in self.options

    def __str__(self) -> str:
        shapes = ", ".join(f"{n}{tuple(t.shape)} {t.dtype}" for n, t in self.tensors.items())
        options = {n: o.tolist() if isinstance(o, Tensor) else o for n, o in self.options.items()}
        return f"Call(seed={self.seed}, {shapes}, {options})"

    def run(self, **extra: Any) -> onepass.AttentionOutput:
        """Make the call under test."""
        arguments: dict[str, Any] = {**self.tensors, **self.options, **extra}
        with self._seeded():
            if self.is_packed:
                return onepass.attention_varlen(**arguments, return_lse=True)
            return onepass.attention(**arguments, return_lse=True)

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        """With dropout, torch's generators in the same state for each run, and as they were afterwards."""
        if not self.options.get("dropout_p"):
            yield
            return
        device = self.tensors["q"].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed or 0)
            yield

    def _reference_options(self) -> dict[str, Any]:
        """The options for the oracle, with the random state that `run` draws."""
        if not self.options.get("dropout_p"):
            return self.options
        with self._seeded():
            return self.options | {"dropout_state": philox.random_state(self.tensors["q"].device)}

    def expected(self, compute_dtype: torch.dtype = torch.float64) -> reference.Reference:
        """The oracle's answer, or plain PyTorch's with the inputs' own dtype."""
        arguments: dict[str, Any] = {**self.tensors, **self._reference_options(), "compute_dtype": compute_dtype}
        return reference.attention_varlen(**arguments) if self.is_packed else reference.attention(**arguments)

    def compare(self, gradients: bool = True, with_floor: bool = False, through_lse: bool = True) -> list[Comparison]:
        """Run forward (and backward through out and lse) three ways and compare.

        Args:
            gradients: also compare dq, dk, dv, dsinks, dalibi_slopes and dbias.
            through_lse: the loss depends on lse, too.
            with_floor: also allow out what rounding alone may do (`rounding.py`), for degenerate cases. Gradients
                always have that floor, since they are recomputed from an lse that is rounded to its dtype.

        Returns: a Comparison each for out, lse and the gradients.
        """
        dtype = self.tensors["q"].dtype
        plain_dtype = torch.float32 if dtype == torch.float64 else dtype
        inputs = self.differentiable()
        results, all_leaves = [], []
        for compute_dtype in (None, torch.float64, plain_dtype):
            # gradients have the dtype of their leaves: without a cast the oracle's would be rounded, and plain
            # PyTorch's too exact for float64
            is_cast = compute_dtype == torch.float64 or compute_dtype not in (None, dtype)
            leaves = {n: (t.to(compute_dtype) if is_cast else t).detach() for n, t in inputs.items()}
            leaves = {n: t.requires_grad_(gradients) for n, t in leaves.items()}
            tensors, options = ({n: leaves.get(n, t) for n, t in d.items()} for d in (self.tensors, self.options))
            call = replace(self, tensors=tensors, options=options)
            results.append(call.run() if compute_dtype is None else call.expected(compute_dtype))
            all_leaves.append(leaves)
        actual, oracle, plain = results
        generator = torch.Generator().manual_seed(0)
        dout = torch.randn(actual.out.shape, generator=generator, dtype=torch.float32).to(actual.out)
        dlse = torch.randn(actual.lse.shape, generator=generator, dtype=torch.float32).to(actual.lse)
        dlse *= through_lse
        assert isinstance(oracle, reference.Reference)
        floors = self._floors(dout, dlse, oracle)
        rows = [
            compare("out", actual.out, oracle.out, plain.out, floor=floors.get("out", 0.0) if with_floor else 0.0),
            compare_lse(actual.lse, oracle.lse),
        ]
        if gradients:
            all_gradients = []
            for result, leaves in zip(results, all_leaves, strict=True):
                # an empty row's lse is -inf, unless it has a sink, and has no gradient
                lse_term = torch.where(result.lse == -torch.inf, 0.0, result.lse) * dlse.to(result.lse)
                loss = (result.out * dout.to(result.out)).sum()
                loss = loss + lse_term.sum() if through_lse else loss
                all_gradients.append(torch.autograd.grad(loss, list(leaves.values())))
            for name, mine, exact, standard in zip(inputs, *all_gradients, strict=True):
                found = [mine, exact, standard, torch.as_tensor(floors.get(f"d{name}", 0.0))]
                if name == "bias":  # (.., rows, heads, keys), as `compare` has rows, heads and columns
                    found = [t.transpose(-3, -2) for t in found]
                rows.append(compare_gradients(f"d{name}", found[0], found[1], found[2], found[3]))
        return rows

    def differentiable(self) -> dict[str, Tensor]:
        """The tensors of the call that have a gradient."""
        names = ("sinks", *WITH_GRADIENT)
        return {**self.tensors, **{name: self.options[name] for name in names if name in self.options}}

    def check(self, gradients: bool = True, with_floor: bool = False, through_lse: bool = True) -> list[Comparison]:
        """`compare`, and raise AssertionError with the call in its message if anything is over its budget."""
        rows = self.compare(gradients, with_floor, through_lse)
        bad = [str(row) for row in rows if not row.ok]
        if bad:
            raise AssertionError(f"{self}\n  " + "\n  ".join(bad))
        return rows

    def _floors(self, dout: Tensor, dlse: Tensor, oracle: reference.Reference) -> dict[str, Tensor]:
        """`rounding_terms` of the whole call, times the epsilons of the dtypes that the terms are rounded to."""
        options, (q, k, v) = dict(self._reference_options()), self.tensors.values()
        eps = torch.finfo(torch.float64 if q.dtype == torch.float64 else torch.float32).eps
        if not self.is_packed:
            terms = rounding_terms(q, k, v, dout, dlse, oracle, **options)
        else:
            starts_q, starts_k = options.pop("cu_seqlens_q").tolist(), options.pop("cu_seqlens_k").tolist()
            used = options.pop("seqused_k", None)
            terms, wholes = {}, {}
            for name in WITH_GRADIENT:
                if name in options:
                    wholes[name] = options[name] = options[name].detach().requires_grad_()
            for b in range(len(starts_q) - 1):
                end = starts_k[b + 1] if used is None else starts_k[b] + int(used[b])
                rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], end)
                one = reference.Reference(oracle.out[None, rows], oracle.lse[None, :, rows])
                tensors = q[None, rows], k[None, keys], v[None, keys], dout[None, rows], dlse[None, :, rows]
                own = reference.of_sequence(options, b, rows, keys) | {"first_entry": b}
                for name, sequence_terms in rounding_terms(*tensors, one, **own).items():
                    # dsinks is a sum over sequences, and so may others be; each row of q, k and v belongs to one
                    if "dsinks" in name:
                        terms[name] = terms.get(name, 0.0) + sequence_terms
                        continue
                    argument = name.split()[0][1:]
                    if argument in wholes:
                        (found,) = torch.autograd.grad(
                            own[argument], wholes[argument], sequence_terms.to(own[argument])
                        )
                        terms[name] = terms.get(name, 0.0) + found.double()
                        continue
                    is_of_keys = name[:2] in ("dk", "dv")
                    shape = (k if is_of_keys else q).shape[:-1] + sequence_terms.shape[-1:]
                    whole = terms.setdefault(name, sequence_terms.new_zeros(shape))
                    if sequence_terms.numel():  # without query heads there are no terms, though k and v may have heads
                        whole[keys if is_of_keys else rows] = sequence_terms[0]
        out_eps = torch.finfo(q.dtype).eps
        return {
            name: eps * terms[name] + out_eps * terms.get(f"{name} of out", 0.0) + terms.get(f"{name} of steps", 0.0)
            for name in terms
            if " of " not in name
        }
