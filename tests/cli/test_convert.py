"""`recycle convert`."""

from pathlib import Path

from recycle import Shape
from recycle.ir.families import one_f_one_b
from tests.cli.command import Command


def test_native_to_native_is_the_same_file(command: Command, tmp_path: Path) -> None:
    source, target = tmp_path / "a.json", tmp_path / "b.json"
    one_f_one_b(Shape(1, 2, 2)).save(source)
    assert command("convert", source, target).out == f"{target}: D=1 P=2 m=2, 8 instructions\n"
    assert target.read_bytes() == source.read_bytes()
    assert command("convert", source, tmp_path / "c", "--from", "native", "--to", "native").status == 0
    assert (tmp_path / "c").read_bytes() == source.read_bytes()


def test_unknown_formats_are_refused_with_the_list_and_write_nothing(command: Command, tmp_path: Path) -> None:
    source = tmp_path / "a.json"
    one_f_one_b(Shape(1, 2, 2)).save(source)
    assert command("convert", source, tmp_path / "b.json", "--to", "xml").refused("'xml' is not a format", "native")
    assert command("convert", source, tmp_path / "b.json", "--from", "xml").refused("'xml' is not a format", "native")
    assert command("convert", source, tmp_path / "b.xml").refused("no format has the suffix '.xml'")
    assert command("convert", tmp_path / "none.json", tmp_path / "b.json").refused("cannot be read")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
