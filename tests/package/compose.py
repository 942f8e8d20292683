#!/usr/bin/env python3
"""The files of deploy/ fit each other and the programs: attnd takes its settings, what is mounted and
copied is there, volumes and services are named, the variables are the package's, Prometheus's rules
are where it looks. Needs python3-yaml (77 without).

  tests/package/compose.py SOURCE_DIR BIN_DIR
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

try:
    import yaml
except ImportError:
    print("skipped: no python3-yaml")
    sys.exit(77)

SOURCE, BIN = map(pathlib.Path, sys.argv[1:])
HERE = SOURCE / "deploy/vllm"
bad = []


def want(is_so, what):
    if not is_so:
        bad.append(what)


compose = yaml.safe_load((HERE / "compose.yml").read_text())
services, volumes = compose["services"], compose["volumes"]
inside = {}  # of attnd's container, by path: the file here
for name, service in services.items():
    for mount in service.get("volumes", ()):
        source, target = re.match(r"(\$\{.*?\}|[^:]*):([^:]*)", mount).groups()
        if source.startswith("."):
            want((HERE / source).is_file(), f"{name} mounts {source}, which is not there")
            inside[name, target] = HERE / source
        elif not source.startswith("${"):
            want(source in volumes, f"{name} mounts {source}, which is no volume")
    for other in service.get("depends_on", ()):
        want(other in services, f"{name} waits for {other}, which is no service")
    network = service.get("network_mode", "service:attnd").removeprefix("service:")
    want(network in services, f"{name} shares the network of {network}")
    if network != name and "network_mode" in service:
        want("ports" not in service, f"{name} has a network that is {network}'s, and ports")

attnd, vllm = services["attnd"], services["vllm"]
want(attnd["user"] == vllm["user"], "attnd and vllm are two users: they would not share memory")
command = attnd["command"]
config = inside["attnd", command[command.index("--config") + 1]].read_text()
endpoint = vllm["environment"]["ATTND_VLLM"]
want(endpoint in config, f"attnd does not listen on {endpoint}")
http = re.search(r"^http = (.*)$", config, re.M).group(1)
with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, "attnd.conf")
    file.write_text(config.replace("/run/attnd", folder).replace(http, "off").replace("8G", "64M"))
    env = {k: v for k, v in os.environ.items() if not k.startswith("ATTND_")}
    r = subprocess.run([BIN / "attnd", "--check-config", "--config", file], env=env, capture_output=True, text=True)
    want(r.returncode == 0, f"attnd.conf: {r.stderr}")

prometheus = yaml.safe_load(inside["prometheus", "/etc/prometheus/prometheus.yml"].read_text())
for rules in prometheus["rule_files"]:
    want(("prometheus", rules) in inside, f"no {rules} in Prometheus's container")
targets = [t for job in prometheus["scrape_configs"] for s in job["static_configs"] for t in s["targets"]]
want(http in targets, f"Prometheus does not look at {http}")
want(services["prometheus"]["network_mode"] == "service:attnd", "attnd's metrics are for loopback alone")
port = next(str(p).split(":")[-1] for p in vllm["ports"])
want(f"vllm:{port}" in targets, f"Prometheus does not look at vllm:{port}")

settings = (SOURCE / "clients/vllm/src/attnd_vllm/settings.py").read_text()
for variable in vllm["environment"]:
    want(not variable.startswith("ATTND_") or f'"{variable}"' in settings, f"{variable} is no variable of attnd-vllm")
dockerfile = (HERE / "Dockerfile").read_text()
want(int(re.match(r"(\d+)g", vllm.get("shm_size", "0g"))[1]) > 0, "vllm's processes have 64 MiB to share, and need 160")
want(f"--uid {vllm['user'].partition(':')[0]} --create-home" in dockerfile, "vllm's user has no home")
for needed in "libprotobuf-c1", "libssl3", "libnuma1", "g++":
    want(f" {needed} " in dockerfile, f"the Dockerfile does not install {needed}")
for copied in re.findall(r"^COPY (\S+) ", dockerfile, re.M):
    want(copied.startswith("build/") or (SOURCE / copied).exists(), f"the Dockerfile copies {copied}, which is not there")

print(*bad, sep="\n")
sys.exit(bool(bad))
