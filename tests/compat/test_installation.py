"""install: modules, distributions and operators of flash-attn's names, and what was there before.

Each test runs in a process of its own, whose sys.modules holds what the test put there.
"""

import importlib
import subprocess
import sys

import fresh_process
import pytest
from fresh_process import check

from onepass.compat import __main__ as compat_main


def test_modules_and_their_functions():
    check("""
        import importlib, importlib.util, sys
        from onepass import compat
        assert importlib.util.find_spec("flash_attn") is None
        compat.install()
        import flash_attn
        import flash_attn.layers.rotary
        from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
        from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_backward
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
        from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
        from flash_attn.ops.triton.rotary import apply_rotary
        from flash_attn.cute import flash_attn_func as f4
        from flash_attn.cute.interface import _flash_attn_fwd
        import flash_attn_2_cuda
        from flash_attn_interface import flash_attn_func as f3
        import flash_attn_3
        from flash_attn_3.flash_attn_interface import _flash_attn_forward, flash_attn_with_kvcache as packaged
        import onepass.compat.flash_attn as c2, onepass.compat.flash_attn_3 as c3, onepass.compat.flash_attn_4 as c4
        assert (flash_attn_func, f3, f4) == (c2.flash_attn_func, c3.flash_attn_func, c4.flash_attn_func)
        assert packaged is c3.flash_attn_with_kvcache
        assert (flash_attn.__version__, flash_attn_3.__version__) == ("2.8.3", "3.0.0")
        assert flash_attn_2_cuda.fwd is c2.flash_attn_gpu.fwd
        for name in ("flash_attn", "flash_attn.cute", "flash_attn.bert_padding", "flash_attn_interface"):
            assert importlib.util.find_spec(name) is not None, name
            module = sys.modules.pop(name)
            assert importlib.import_module(name) is module
        assert not hasattr(flash_attn, "_flash_attn_forward")
        try:
            import flash_attn.losses
        except ModuleNotFoundError:
            pass
        else:
            raise AssertionError
    """)


def test_distributions():
    check("""
        from importlib import metadata
        from onepass import compat
        compat.install()
        assert metadata.version("flash_attn") == metadata.version("flash-attn") == "2.8.3"
        assert metadata.version("flash_attn_3") == "3.0.0"
        assert metadata.metadata("flash-attn-4")["Name"] == "flash-attn-4"
        found = metadata.packages_distributions()
        assert set(found["flash_attn"]) == {"flash_attn", "flash-attn-4"}
        assert found["flash_attn_interface"] == found["flash_attn_3"] == ["flash_attn_3"]
        assert "torch" in found
        compat.uninstall()
        assert "flash_attn" not in metadata.packages_distributions()
        try:
            metadata.version("flash_attn")
        except metadata.PackageNotFoundError:
            pass
        else:
            raise AssertionError
    """)


def test_undo_is_complete():
    check("""
        import importlib.util, sys, torch
        from onepass import compat
        before = list(sys.meta_path)
        for _ in range(2):
            with compat.install():
                import flash_attn.cute
                with compat.install():
                    pass
                import flash_attn_interface  # the inner block has undone nothing
                assert hasattr(torch.ops.flash_attn, "_flash_attn_forward")
                assert hasattr(torch.ops.flash_attn_3, "fwd")
            assert not [name for name in sys.modules if name.startswith("flash_attn")]
            assert sys.meta_path == before
            assert not hasattr(torch.ops.flash_attn, "_flash_attn_forward")
            assert not hasattr(torch.ops.flash_attn_3, "fwd")
            assert importlib.util.find_spec("flash_attn") is None
        compat.uninstall()
        with compat.install():
            compat.uninstall()
            compat.install()
        import flash_attn  # the block has left the later installation alone
        other = sys.modules["flash_attn"] = type(sys)("flash_attn")
        compat.uninstall()
        assert sys.modules["flash_attn"] is other
    """)


def test_operators():
    check("""
        import sys, types, torch
        from onepass import compat
        module = types.SimpleNamespace(_loaded_implementation="flash_attention_2")
        sys.modules["transformers.modeling_flash_attention_utils"] = module
        sys.modules["flash_attn"] = types.ModuleType("flash_attn")  # imported, and not to be found
        try:
            compat.install()
        except RuntimeError as error:
            assert "expected no module flash_attn" in str(error)
        else:
            raise AssertionError
        del sys.modules["flash_attn"]
        compat.install()
        assert module._loaded_implementation is None  # transformers looks for flash-attn again
        for operators in (torch.ops.flash_attn, torch.ops.flash_attn_3):
            for name in ("_flash_attn_backward", "_flash_attn_varlen_backward", "bwd"):
                if hasattr(operators, name):  # what they write, which torch.compile has to know
                    arguments = getattr(operators, name).default._schema.arguments
                    assert [a.name for a in arguments if a.is_write] == ["dq", "dk", "dv"]
        q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
        options = 0.0, 8 ** -0.5, True, -1, -1, 0.0, None
        out, lse, _, state = torch.ops.flash_attn._flash_attn_forward(q, k, v, *options, False)
        from onepass import attention
        torch.testing.assert_close(out, attention(q, k, v, causal=True))
        dq, dk, dv = (torch.empty_like(q) for _ in range(3))
        torch.ops.flash_attn._flash_attn_backward(out, q, k, v, out, lse, dq, dk, dv, *options, False, state)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        expected = torch.autograd.grad(attention(*leaves, causal=True), leaves, out)
        torch.testing.assert_close((dq, dk, dv), expected)
    """)


@pytest.mark.slow
def test_operators_are_traced():
    """torch.compile follows them without graph breaks, and torch's own checks of an operator pass."""
    check("""
        import torch
        from onepass import compat
        compat.install()
        q, k, v = (torch.randn(6, 2, 8) for _ in range(3))
        offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
        options = 8 ** -0.5, True, 2, -1, 3.0, torch.rand(2)

        def run(q, k, v, name, *lengths):
            forward = getattr(torch.ops.flash_attn, f"_flash_attn{name}_forward")
            backward = getattr(torch.ops.flash_attn, f"_flash_attn{name}_backward")
            out, lse, _, state = forward(q, k, v, *lengths, 0.0, *options, False)
            gradients = [torch.empty_like(t) for t in (q, k, v)]
            sums = backward(out, q, k, v, out, lse, *gradients, *lengths, 0.0, *options, False, state)
            return out, lse, *gradients, sums

        for tensors, name, *lengths in (
            [(q[None], k[None], v[None]), ""], [(q, k, v), "_varlen", offsets, offsets, 4, 4]
        ):
            traced = torch.compile(run, fullgraph=True, backend="aot_eager")(*tensors, name, *lengths)
            torch.testing.assert_close(traced, run(*tensors, name, *lengths))
            for dropout_p in (0.0, 0.2):
                operator = getattr(torch.ops.flash_attn, f"_flash_attn{name}_forward").default
                torch.library.opcheck(operator, (*tensors, *lengths, dropout_p, *options, False))
    """)


def test_transformers_forgets_what_it_knew():
    pytest.importorskip("transformers")
    check("""
        import torch
        torch.cuda.is_available = lambda: True
        from transformers.utils import is_flash_attn_2_available as is_2, is_flash_attn_3_available as is_3
        from transformers.utils import is_flash_attn_4_available as is_4
        from onepass import compat
        for _ in range(2):
            assert not (is_2() or is_3() or is_4())
            with compat.install():
                assert is_2() and is_3() and is_4()
    """)


def test_older_transformers_forgets_what_it_knew():
    """Up to 5.17 it has a dict of the distributions, made when it was imported, which others import by name."""
    check("""
        import importlib.metadata, sys, types
        module = types.ModuleType("transformers.utils.import_utils")
        module.PACKAGE_DISTRIBUTION_MAPPING = before = importlib.metadata.packages_distributions()
        sys.modules[module.__name__] = module
        from onepass import compat
        assert "flash_attn" not in before
        with compat.install():
            names = {key: {name.replace("_", "-") for name in before[key]} for key in before if "flash" in key}
            assert {"flash-attn", "flash-attn-4"} <= names["flash_attn"]
            assert "flash-attn-3" in names["flash_attn_interface"]
        assert "flash_attn" not in before and "torch" in before
    """)


def test_operators_of_flash_attn_3():
    check("""
        import torch
        from onepass import attention, compat
        compat.install()
        import flash_attn_3._C
        q, k, v = (torch.randn(2, n, 2, 8) for n in (5, 9, 9))
        absent = [None] * 7
        into = torch.empty_like(q)
        # all arguments, then those that have no default
        out, lse, *rest = torch.ops.flash_attn_3.fwd(
            q, k, v, *absent[:3], into, *absent[:5], 5, 9, *absent[:6], *absent[:3],
            0.3, True, 3, -1, 0, 2.0, True, None, 0, None, 0,
        )
        expected, expected_lse = attention(
            q, k, v, causal=True, softmax_scale=0.3, window=(3, None), softcap=2.0, return_lse=True
        )
        assert len(rest) == 2 and out.data_ptr() == into.data_ptr()
        torch.testing.assert_close((out, lse), (expected, expected_lse))
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v)
        torch.testing.assert_close(out, attention(q, k, v))

        dout = torch.randn_like(q)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        expected = torch.autograd.grad(attention(*leaves), leaves, dout)
        found = torch.ops.flash_attn_3.bwd(dout, q, k, v, out, lse)
        assert len(found) == 8
        torch.testing.assert_close(tuple(found[:3]), expected)
        torch.testing.assert_close(found[3][..., :5], (dout * out).sum(-1).transpose(1, 2))
        given = [torch.empty_like(t) for t in (q, k, v)]
        options = *absent[:4], 5, 9, None, True, 3, -1, 0.0, True, 0
        expected = torch.autograd.grad(attention(*leaves, causal=True, window=(3, None)), leaves, dout)
        out, lse = attention(q, k, v, causal=True, window=(3, None), return_lse=True)
        torch.ops.flash_attn_3.bwd(dout, q, k, v, out, lse, *given, *options)
        torch.testing.assert_close(tuple(given), expected)

        outs, lses = torch.randn(3, 2, 5, 2, 8), torch.randn(3, 2, 5, 2)
        merged, total = torch.ops.flash_attn_3.fwd_combine(outs, lses)
        torch.testing.assert_close(total, lses.logsumexp(0))
        torch.testing.assert_close(merged, (lses.softmax(0)[..., None] * outs).sum(0))
        lengths = torch.ones(2, dtype=torch.int32)
        metadata = torch.ops.flash_attn_3.get_scheduler_metadata(2, 5, 9, 2, 2, 8, 8, torch.bfloat16, lengths)
        assert metadata.dtype == torch.int32 and not metadata.numel()
    """)


@pytest.mark.parametrize("is_imported", [False, True])
def test_a_real_library_is_refused_and_can_be_replaced(tmp_path, is_imported):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("real = True")
    (tmp_path / "flash_attn" / "bert_padding.py").write_text("real = True")
    (tmp_path / "flash_attn" / "losses.py").write_text("real = True")
    imports = "import flash_attn.bert_padding, flash_attn.losses" if is_imported else ""
    check(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        {imports}
        from onepass import compat
        before = dict(sys.modules), list(sys.meta_path)
        try:
            compat.install()
        except RuntimeError as error:
            assert "flash_attn" in str(error) and "replace=True" in str(error), error
        else:
            raise AssertionError
        named = {{n for n in sys.modules if n.startswith("flash_attn")}}
        assert named == {{n for n in before[0] if n.startswith("flash_attn")}} and sys.meta_path == before[1]
        with compat.install(replace=True):
            import flash_attn.bert_padding
            assert not hasattr(flash_attn, "real") and not hasattr(flash_attn.bert_padding, "real")
            assert "flash_attn.losses" not in sys.modules
        for name in named:
            assert sys.modules[name] is before[0][name]
        import flash_attn.losses
        assert flash_attn.real and flash_attn.losses.real
    """)


def test_run(tmp_path):
    (tmp_path / "beside.py").write_text("value = 3")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside\n"
        "from flash_attn import flash_attn_func\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv[1:], beside.value, flash_attn_func.__module__)\n"
    )
    status, output = fresh_process.run(module="onepass.compat", arguments=("run", str(script), "--flag", "x"))
    assert status == 0, output
    assert output.split() == ["['--flag',", "'x']", "3", "onepass.compat.flash_attn.functions"]


@pytest.mark.slow
def test_run_a_module(tmp_path):
    (tmp_path / "program.py").write_text(
        "import sys\n"
        "from flash_attn import flash_attn_func\n"
        "print(__name__, sys.argv[1:], flash_attn_func.__module__)\n"
    )
    command = [sys.executable, "-m", "onepass.compat", "run", "-m", "program", "-x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["__main__", "['-x']", "onepass.compat.flash_attn.functions"]


@pytest.mark.parametrize("options", [[], ["--replace"]])
def test_a_module_runs_as_the_main_program(tmp_path, monkeypatch, capsys, options):
    (tmp_path / "program.py").write_text(
        "import sys\nprint(__name__, sys.argv, sys.modules['__main__'].__dict__ is globals())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    installed = []
    monkeypatch.setattr(compat_main, "install", lambda replace: installed.append(replace))
    monkeypatch.setattr(sys, "argv", sys.argv)
    compat_main.main(["run", *options, "-m", "program", "-x"])
    assert capsys.readouterr().out.strip() == f"__main__ {[str(tmp_path / 'program.py'), '-x']} True"
    assert installed == [bool(options)]


@pytest.mark.parametrize("name", ["nomod", "nopkg.nomod", "folder", "program.nomod", "...", "__main__"])
def test_run_says_which_module_is_missing(tmp_path, monkeypatch, name):
    (tmp_path / "program.py").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compat_main, "install", lambda replace: None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setitem(sys.modules, "__main__", type(sys)("__main__"))
    with pytest.raises(SystemExit, match=f"^onepass.compat: expected a module that can be run, got {name!r}, "):
        compat_main.main(["run", "-m", name])


def test_run_leaves_errors_of_a_module_alone(tmp_path, monkeypatch):
    (tmp_path / "needs_another").mkdir()
    (tmp_path / "needs_another" / "__init__.py").write_text("import nomod")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nomod"):
        compat_main._refusal("needs_another.part")


def test_run_helps(capsys):
    for arguments in (["--help"], ["-h"], ["run", "--help"]):
        compat_main.main(arguments)
        assert "usage: python -m onepass.compat run" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [(), ("run",), ("run", "-m"), ("walk", "x.py"), ("run", "--unknown", "x.py"), ("run", "none.py"), ("run", "/")],
)
def test_run_refuses_bad_arguments(arguments):
    expected = (
        "onepass.compat: expected a script" if arguments[-1:] in (("none.py",), ("/",)) else "usage: python -m onepass"
    )
    with pytest.raises(SystemExit, match=f"^{expected}"):
        compat_main.main(list(arguments))


@pytest.mark.parametrize("name", ["bert_padding", "rotary"])
def test_old_names_of_modules(name):
    sys.modules.pop(f"onepass.compat.{name}", None)
    with pytest.warns(FutureWarning, match=f"onepass.compat.{name} is now onepass.compat.upstream.{name}"):
        old = importlib.import_module(f"onepass.compat.{name}")
    new = importlib.import_module(f"onepass.compat.upstream.{name}")
    assert all(getattr(old, public) is getattr(new, public) for public in new.__all__)
