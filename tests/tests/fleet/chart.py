"""Installs the Helm chart into an API server that records its objects, and compares them with those of kustomize.

Arguments: the chart's folder, and the file with kustomize's output.
"""

import asyncio
import json
import pathlib
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import kubernetes_validate
import yaml
from helm_sdkpy import Configuration, HelmError, Install, Lint

# The oldest supported version of Kubernetes, and the newest that the validator knows.
VERSIONS = ["1.34", "1.37"]
# Kinds by their group and version: plural name, and whether they belong to a namespace.
KINDS = {
    "v1": {"Namespace": ("namespaces", False), "ServiceAccount": ("serviceaccounts", True)},
    "apps/v1": {"DaemonSet": ("daemonsets", True)},
    "rbac.authorization.k8s.io/v1": {
        "ClusterRole": ("clusterroles", False),
        "ClusterRoleBinding": ("clusterrolebindings", False),
    },
    "admissionregistration.k8s.io/v1": {
        "ValidatingAdmissionPolicy": ("validatingadmissionpolicies", False),
        "ValidatingAdmissionPolicyBinding": ("validatingadmissionpolicybindings", False),
    },
    "resource.k8s.io/v1": {"DeviceClass": ("deviceclasses", False)},
}
# The namespace of Helm's record of the release.
RECORDS = "kube-system"
# The form in which Helm writes that record. Objects of charts are JSON.
PROTOBUF = "application/vnd.kubernetes.protobuf"


def resources(group_version):
    """Returns the answer to a request for the kinds of a group."""
    listed = [
        {"name": plural, "singularName": "", "namespaced": namespaced, "kind": kind, "verbs": ["create", "get", "list"]}
        for kind, (plural, namespaced) in KINDS[group_version].items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": listed}


def groups():
    """Returns the answer to a request for the groups."""
    named = []
    for group_version in KINDS:
        if "/" in group_version:
            version = {"groupVersion": group_version, "version": group_version.split("/")[1]}
            named.append({"name": group_version.split("/")[0], "versions": [version], "preferredVersion": version})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": named}


class Server(ThreadingHTTPServer):
    """An API server without objects, which records those that are created."""

    def __init__(self):
        self.objects = []
        self.requests = []
        self.records = 0
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of Helm's client."""

    def log_message(self, *_arguments):
        """Prints nothing."""

    def answer(self, code, value):
        """Sends a value as JSON."""
        text = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        """Describes the server's kinds. It has no objects yet."""
        path = self.path.split("?")[0].strip("/")
        self.server.requests.append(f"GET {path}")
        group_version = path.removeprefix("apis/").removeprefix("api/")
        if path == "version":
            self.answer(200, {"major": "1", "minor": "34", "gitVersion": "v1.34.0", "platform": "linux/amd64"})
        elif path == "api":
            self.answer(200, {"kind": "APIVersions", "versions": ["v1"]})
        elif path == "apis":
            self.answer(200, groups())
        elif group_version in KINDS:
            self.answer(200, resources(group_version))
        elif path.endswith("/secrets"):
            self.answer(200, {"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": []})
        else:
            self.answer(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404})

    def do_POST(self):
        """Records an object, if its path is that of its kind."""
        self.server.requests.append(f"POST {self.path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Content-Type"] == PROTOBUF:
            self.record(body)
            return
        body = json.loads(body)
        plural, namespaced = KINDS[body["apiVersion"]][body["kind"]]
        group = "api/v1" if body["apiVersion"] == "v1" else f"apis/{body['apiVersion']}"
        within = f"/namespaces/{body['metadata'].get('namespace', RECORDS)}" if namespaced else ""
        assert self.path.split("?")[0] == f"/{group}{within}/{plural}", self.path
        self.server.objects.append(body)
        self.answer(201, body)

    def do_PUT(self):
        """Accepts changes of Helm's record of the release."""
        self.record(self.rfile.read(int(self.headers["Content-Length"])))

    def record(self, body):
        """Accepts Helm's record of the release, which is a secret."""
        assert f"/namespaces/{RECORDS}/secrets" in self.path, self.path
        self.server.records += 1
        self.send_response(201)
        self.send_header("Content-Type", PROTOBUF)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def installed(chart, values):
    """Installs the chart, and returns its objects by kind and name."""
    server = Server()
    address = f"http://127.0.0.1:{server.server_port}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "config"
        path.write_text(json.dumps(config))
        try:
            with Configuration(namespace=RECORDS, kubeconfig=str(path)) as helm:
                asyncio.run(Install(helm).run("gpu-mediator", chart, values=values, wait=False))
        finally:
            server.shutdown()
    assert server.records, "Helm has recorded no release"
    for one in server.objects:
        # Helm's own marks.
        assert one["metadata"]["annotations"].pop("meta.helm.sh/release-namespace") == RECORDS
        one["metadata"]["annotations"].pop("meta.helm.sh/release-name")
        assert one["metadata"]["labels"].pop("app.kubernetes.io/managed-by") == "Helm"
        for key in ["annotations", "labels"]:
            if not one["metadata"][key]:
                del one["metadata"][key]
    return by_name(server.objects)


def by_name(objects):
    """Returns objects by their kind and name."""
    named = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    assert len(named) == len(objects), "two objects have one name"
    return named


def linted(chart):
    """Prints what Helm reports about the chart."""
    with Configuration() as helm:
        report = asyncio.run(Lint(helm).run(chart))
    print("lint:", json.dumps(report))
    # 1 is advice, such as an icon; 2 a warning, 3 an error.
    assert report["TotalChartsLinted"] == 1 and not report["Errors"], report
    assert all(message["Severity"] == 1 for message in report["Messages"]), report


def refused(chart, values):
    """Checks that the chart's schema refuses values."""
    try:
        installed(chart, values)
    except HelmError as error:
        print("refused:", str(error).splitlines()[0])
        return
    raise AssertionError(f"{values} were accepted")


def main():
    """Compares and validates."""
    chart, rendered = sys.argv[1:]
    linted(chart)
    expected = by_name(list(yaml.safe_load_all(pathlib.Path(rendered).read_text())))
    objects = installed(chart, {})
    assert objects.keys() == expected.keys(), (objects.keys() ^ expected.keys(), "only in one of both")
    for name, one in objects.items():
        assert one == expected[name], f"{name}:\nchart: {json.dumps(one)}\nkustomize: {json.dumps(expected[name])}"
        for version in VERSIONS:
            kubernetes_validate.validate(one, version, strict=True)
    print(f"{len(objects)} objects are equal and valid in {', '.join(VERSIONS)}")

    values = {
        "image": {"repository": "registry.internal/gpu", "tag": "1", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "pull"}],
        "namespace": {"name": "shares", "create": False},
        "cdiDevices": [],
        "metricsPort": 9000,
    }
    changed = installed(chart, values)
    for one in changed.values():
        kubernetes_validate.validate(one, VERSIONS[0], strict=True)
    assert ("Namespace", "shares") not in changed
    driver = changed["DaemonSet", "gpu-mediator-dra"]
    pod = driver["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert driver["metadata"]["namespace"] == "shares" and pod["imagePullSecrets"] == [{"name": "pull"}]
    assert (container["image"], container["imagePullPolicy"]) == ("registry.internal/gpu:1", "Always")
    assert container["ports"][0]["containerPort"] == 9000
    assert not any("cdi-device" in argument for argument in container["args"]), container["args"]
    policy = changed["ValidatingAdmissionPolicy", "resourceslices.gpu-mediator.internal"]
    assert "serviceaccount:shares:" in policy["spec"]["matchConditions"][0]["expression"]
    print("changed values reach the objects")

    refused(chart, {"metricsPort": "many"})
    refused(chart, {"imagee": {}})


main()
