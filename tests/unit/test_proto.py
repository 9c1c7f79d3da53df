"""The committed generated messages agree with kvstore.proto."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

import kvstore.proto
from kvstore.proto import kvstore_pb2
from kvstore.transport.frames import Verb

PROTO = Path(kvstore.proto.__file__).with_name("kvstore.proto")


def test_generated_descriptor_is_what_protoc_makes_of_the_proto(tmp_path: Path) -> None:
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed")
    out = tmp_path / "set.bin"

    # In a process of its own: its copy of protobuf and that of NIXL, which other tests load, cannot live in one.
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO.parent}", f"--descriptor_set_out={out}", PROTO.name]
    subprocess.run(protoc, check=True, timeout=60)

    (fresh,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    committed = descriptor_pb2.FileDescriptorProto.FromString(kvstore_pb2.DESCRIPTOR.serialized_pb)
    assert strip_json_names(committed) == strip_json_names(fresh)


def strip_json_names(proto: descriptor_pb2.FileDescriptorProto) -> descriptor_pb2.FileDescriptorProto:
    def strip(message: descriptor_pb2.DescriptorProto) -> None:
        for field in message.field:
            field.ClearField("json_name")
        for nested in message.nested_type:
            strip(nested)

    for message in proto.message_type:
        strip(message)
    return proto


def test_every_message_of_the_proto_text_is_in_the_descriptor() -> None:
    """Needs no protoc: names and numbers as a person reads them in the file."""
    text = re.sub(r"//.*", "", PROTO.read_text())
    for name, body in re.findall(r"message (\w+) \{([^}]*)\}", text):
        fields = {field: int(number) for field, number in re.findall(r"(\w+) = (\d+);", body)}
        message = kvstore_pb2.DESCRIPTOR.message_types_by_name[name]
        assert {field.name: field.number for field in message.fields} == fields, name


def test_verbs_of_the_local_socket_are_the_methods_of_the_service() -> None:
    service = kvstore_pb2.DESCRIPTOR.services_by_name["KVStore"]

    assert [method.name.upper() for method in service.methods] == [verb.name for verb in Verb]
