#!/usr/bin/env python3
"""The chart's manifests: deploy/kubernetes/attnd.yaml is what deploy/helm/render makes of it, every object is
valid for Kubernetes (kubernetes-validate, strictly, where that is installed), names and ports fit each
other, attnd takes the settings, the agent and controller take their arguments. Needs python3-yaml (77
without). No real Kubernetes runs them, and no helm.

  tests/package/kubernetes.py SOURCE_DIR BIN_DIR
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
try:
    import kubernetes_validate
except ImportError:
    kubernetes_validate = None

SOURCE, BIN = map(pathlib.Path, sys.argv[1:])
RENDER = SOURCE / "deploy/helm/render"
VARIANTS = (
    [],
    ["gpu.devicePlugin=true", "workers=[]", "imagePullSecrets=[{name: pull}]"],
    ["gpu.deviceClass=gpu.nvidia.com", "serviceMonitor=true", "nodeSelector={gpu: h100}",
     "tolerations=[{key: gpu, operator: Exists}]"],
    ["events={llama: {model: llama-3, port: 5557, replayPort: 5558}, t/qwen: {model: qwen, port: 5559, replayPort: 5560}}"],
)
UNKNOWN = ("ServiceMonitor",)  # of Prometheus's operator, not of Kubernetes
bad = []


def want(is_so, what):
    if not is_so:
        bad.append(what)


def render(sets):
    command = [sys.executable, "-B", RENDER, *(a for s in sets for a in ("--set", s))]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def check(objects, sets):
    by = {(o["kind"], o["metadata"]["name"]): o for o in objects}
    want(len(by) == len(objects), f"{sets}: two objects of one name")
    for o in objects:
        if kubernetes_validate is not None and o["kind"] not in UNKNOWN:
            try:
                kubernetes_validate.validate(o, kubernetes_validate.latest_version(), strict=True)
            except kubernetes_validate.ValidationError as e:
                bad.append(f"{sets}: {o['kind']} {o['metadata']['name']}: {e.message} at {list(e.path)}")
    daemons = by["StatefulSet", "attnd"]["spec"]
    pod = daemons["template"]["spec"]
    service = by["Service", daemons["serviceName"]]["spec"]
    labels = daemons["template"]["metadata"]["labels"]
    for selector in (daemons["selector"]["matchLabels"], service["selector"],
                     by["PodDisruptionBudget", "attnd"]["spec"]["selector"]["matchLabels"],
                     by["NetworkPolicy", "attnd"]["spec"]["podSelector"]["matchLabels"]):
        want(selector.items() <= labels.items(), f"{sets}: {selector} selects no daemon")
    claims = {c["name"] for c in pod.get("resourceClaims", ())}
    for workload in (pod, by["Deployment", "attnd-controller"]["spec"]["template"]["spec"]):
        volumes = {v["name"] for v in workload["volumes"]}
        want(workload["serviceAccountName"] == "attnd", f"{sets}: another service account")
        for c in workload["containers"]:
            ports = {p["name"] for p in c.get("ports", ())}
            for probe in ("readinessProbe", "livenessProbe"):
                if probe in c:
                    want(c[probe]["httpGet"]["port"] in ports, f"{sets}: {probe} of no port")
            for mount in c["volumeMounts"]:
                want(mount["name"] in volumes, f"{sets}: {mount['name']} is no volume")
            for claim in c["resources"].get("claims", ()):
                want(claim["name"] in claims, f"{sets}: {claim['name']} is no claim")
            if "command" in c:
                check_arguments(c, sets)
    for claim in pod.get("resourceClaims", ()):
        want(("ResourceClaimTemplate", claim["resourceClaimTemplateName"]) in by, f"{sets}: no template")
    published = [a for c in pod["containers"] for a in c["args"] if a.startswith("--events=")]
    if "events" in "".join(sets):
        want(published == ["--events=llama=tcp://*:5557,tcp://*:5558,kv@$(POD)@llama-3",
                           "--events=t/qwen=tcp://*:5559,tcp://*:5560,kv@$(POD)@qwen"], f"{sets}: {published}")
        allowed = {p["port"] for i in by["NetworkPolicy", "attnd"]["spec"]["ingress"] for p in i["ports"]}
        want({5557, 5558, 5559, 5560} <= allowed, f"{sets}: nobody may subscribe")
    want(pod["terminationGracePeriodSeconds"] > 120, f"{sets}: killed while it evacuates")
    check_config(by["ConfigMap", "attnd"]["data"]["attnd.conf"], sets)


def check_arguments(container, sets):
    module = {"attnd-agent": "agent", "attnd-controller": "controller"}[container["command"][0]]
    known = subprocess.run(
        [sys.executable, "-B", "-m", f"attnd_cluster.{module}", "--help"],
        env={**os.environ, "PYTHONPATH": f"{SOURCE}/clients/cluster/src:{SOURCE}/clients/python/src"},
        capture_output=True, text=True)
    if known.returncode != 0 and "urllib3" in known.stderr:
        print("not checked: arguments, without python3-urllib3")
        return
    for argument in container["args"]:
        option = argument.partition("=")[0]
        want(re.search(rf"{option}\b", known.stdout), f"{sets}: {container['name']} has no {option}")


def check_config(config, sets):
    """With files that are there, and a memory that this machine has."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([BIN / "attnctl", "keys", folder, "--host", "localhost", "--tenant", "t"],
                       check=True, capture_output=True)
        for of, to in (("/etc/attnd-tls/tls", f"{folder}/server"), ("/etc/attnd-tenants", folder),
                       ("/run/attnd", folder), ("tenants = " + folder + "/tenants", f"tenants = {folder}/tenants.conf"),
                       ("kv_memory = 32G", "kv_memory = 64M")):
            config = config.replace(of, to)
        file = pathlib.Path(folder, "attnd.conf")
        file.write_text(config)
        env = {k: v for k, v in os.environ.items() if not k.startswith("ATTND_")}
        r = subprocess.run([BIN / "attnd", "--check-config", "--config", file, "--listen.http", "off"],
                           env=env, capture_output=True, text=True)
        want(r.returncode == 0, f"{sets}: attnd.conf: {r.stderr}")


for sets in VARIANTS:
    check(list(yaml.safe_load_all(render(sets))), sets)
plain = (SOURCE / "deploy/kubernetes/attnd.yaml").read_text()
want(plain == render([]), "deploy/kubernetes/attnd.yaml is not what deploy/helm/render prints")
want(subprocess.run([sys.executable, "-B", RENDER, "--set", "nothing=1"], capture_output=True).returncode != 0,
     "a value that is not there was taken")
print(*bad, sep="\n")
if kubernetes_validate is None:
    print("not checked: schemas, without kubernetes-validate (pip)")
sys.exit(bool(bad))
