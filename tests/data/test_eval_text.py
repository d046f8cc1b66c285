"""The text that `jaxlm eval` measures on."""

from jaxlm.cli import main


def test_data_without_a_name_is_refused(tmp_path, capsys):
    assert main(["eval", str(tmp_path), "--data", ""]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("jaxlm: --data names no text") and error.count("\n") == 1
