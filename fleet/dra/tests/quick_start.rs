//! Tests the quick start for pods in README.md: a shell runs its commands. Substitutes for `kubectl` and `nvidia-ctk`
//! pass their arguments to this test, which acts as the cluster and starts the real driver as specified by the
//! DaemonSet.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::{fs, thread};

use cdi_spec::Spec;
use k8s_openapi::api::apps::v1::DaemonSet;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};

mod support;

use support::api_server::typed;
use support::manifests::{published, rendered, root};
use support::{Node, Process, allocated, named, until};

/// Name of the node.
const NODE: &str = "node-a";

/// A program call made by the shell: the program's name and arguments, and a channel for its output.
type Call = (Vec<String>, oneshot::Sender<String>);

/// The parts of the cluster and its node that the quick start needs.
struct Cluster {
    node: Node,
    labels: Vec<(String, String)>,
    objects: Vec<Value>,
}

/// Returns the code blocks in `language` from the section about pods in README.md.
fn readme(language: &str) -> Vec<String> {
    let text = fs::read_to_string(root().join("README.md")).unwrap();
    let section = text.split("## Pods and jobs\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let mark = format!("```{language}\n");
    let blocks = section.split(&mark).skip(1);
    blocks.map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

/// Writes the substitute programs, which send their name and arguments to `port`, one per line, and print the response.
fn write_programs(folder: &Path, port: u16) {
    fs::create_dir(folder).unwrap();
    for name in ["kubectl", "nvidia-ctk"] {
        let text = format!(
            "#!/bin/bash\nexec 3<>/dev/tcp/127.0.0.1/{port}\nprintf '%s\\n' {name} \"$@\" '' >&3\nread -r code <&3\ncat <&3\nexit \"$code\"\n"
        );
        fs::write(folder.join(name), text).unwrap();
        fs::set_permissions(folder.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
}

/// Receives a call, waits for its output, and sends the output to the substitute program. A dropped sender means that
/// the call failed.
fn pass_on(stream: TcpStream, calls: &mpsc::Sender<Call>) {
    let lines = BufReader::new(&stream).lines().map(Result::unwrap);
    let words = lines.take_while(|line| !line.is_empty()).collect();
    let (sender, receiver) = oneshot::channel();
    let sent = calls.blocking_send((words, sender)).is_ok();
    let answer = receiver.blocking_recv().ok().filter(|_| sent);
    let text = answer.map_or_else(|| "1\n".to_owned(), |output| format!("0\n{output}"));
    (&stream).write_all(text.as_bytes()).unwrap();
}

impl Cluster {
    /// Executes a call and returns its output.
    async fn call(&mut self, words: &[String]) -> String {
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        match *words {
            ["nvidia-ctk", "cdi", "generate", output] => {
                let file = self.inside(output.strip_prefix("--output=").unwrap());
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                let spec = json!({ "cdiVersion": "0.5.0", "kind": "nvidia.com/gpu",
                    "devices": [{ "name": "all", "containerEdits": {} }] });
                fs::write(file, spec.to_string()).unwrap();
                String::new()
            }
            ["kubectl", "label", "node", NODE, label] => {
                let (key, value) = label.split_once('=').unwrap();
                self.labels.push((key.to_owned(), value.to_owned()));
                self.place_driver();
                format!("node/{NODE} labeled\n")
            }
            ["kubectl", "apply", "-k", folder] => {
                let objects = rendered(&root().join(folder));
                let lines = objects.iter().map(|object| {
                    let kind = published(object).to_lowercase();
                    let group = object["apiVersion"].as_str().unwrap().split_once('/');
                    let group = group.map(|(group, _)| format!(".{group}")).unwrap_or_default();
                    format!("{kind}{group}/{} created\n", object["metadata"]["name"].as_str().unwrap())
                });
                let output = lines.collect();
                self.objects = objects;
                self.place_driver();
                output
            }
            ["kubectl", "wait", "--for=create", object, limit] => {
                assert!(limit.starts_with("--timeout="), "{limit}");
                let name = object.strip_prefix("resourceslice/").unwrap();
                until("the slice", async || {
                    let slices = self.node.api.slices();
                    slices.iter().any(|slice| slice.metadata.name.as_deref() == Some(name)).then_some(())
                })
                .await;
                format!("resourceslice.resource.k8s.io/{name} condition met\n")
            }
            _ => panic!("this cluster does not support {words:?}"),
        }
    }

    /// Returns the path in this test's folder that corresponds to a path on the node.
    fn inside(&self, path: &str) -> PathBuf {
        let folders = [("/var/lib/kubelet", "kubelet"), ("/var/run/cdi", "cdi"), ("/run/gpu-mediator", "")];
        let found = folders.iter().find_map(|(outside, name)| Some((path.strip_prefix(outside)?, name)));
        let (rest, name) = found.unwrap_or_else(|| panic!("{path} is not a folder of the driver"));
        self.node.path(format!("{name}{rest}").trim_matches('/'))
    }

    /// Starts the driver as specified by the DaemonSet, once the DaemonSet exists and selects the node.
    fn place_driver(&mut self) {
        let Some(set) = self.objects.iter().find(|object| object["kind"] == "DaemonSet") else { return };
        let set: DaemonSet = typed(set);
        let pod = set.spec.template.spec.unwrap();
        let chosen = pod.node_selector.unwrap().into_iter().all(|pair| self.labels.contains(&pair));
        if !chosen || self.node.driver.is_some() {
            return;
        }
        let container = &pod.containers[0];
        assert_eq!(container.image.as_deref(), Some(concat!("gpu-mediator:", env!("CARGO_PKG_VERSION"))));
        let mounts: Vec<_> = container.volume_mounts.iter().flatten().map(|mount| mount.mount_path.as_str()).collect();
        let arguments = container.args.iter().flatten().map(|argument| match argument.split_once('=') {
            Some(("--metrics", _)) => "--metrics=127.0.0.1:0".to_owned(),
            Some((option, path)) if path.starts_with('/') => {
                assert!(mounts.iter().any(|mount| path.starts_with(mount) || mount.starts_with(path)), "{path}");
                format!("{option}={}", self.inside(path).display())
            }
            _ => argument.clone(),
        });
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-mediator-dra"));
        command.args(arguments).arg("--look-every-ms=100").stdin(Stdio::null());
        command.env("NODE_NAME", NODE).env("KUBECONFIG", self.node.path("kubeconfig"));
        let log = fs::File::create(self.node.path("driver.log")).unwrap();
        self.node.driver = Some(Process(command.stderr(log).spawn().unwrap()));
    }

    /// Runs a script, executes its program calls in this cluster, and returns its output.
    async fn run(&mut self, script: String) -> Output {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let programs = self.node.path("programs");
        write_programs(&programs, listener.local_addr().unwrap().port());
        let (sender, mut calls) = mpsc::channel(1);
        thread::spawn(move || listener.incoming().for_each(|stream| pass_on(stream.unwrap(), &sender)));
        let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
        let shell = move || {
            // TIMEOUT: reached only if the test fails.
            let mut command = Command::new("timeout");
            command.args(["90", "bash", "-e", "-c", &script]).current_dir(root()).env("PATH", path);
            command.stdin(Stdio::null()).output().unwrap()
        };
        let mut ended = tokio::task::spawn_blocking(shell);
        loop {
            tokio::select! {
                output = &mut ended => return output.unwrap(),
                Some((words, answer)) = calls.recv() => drop(answer.send(self.call(&words).await)),
            }
        }
    }
}

#[tokio::test]
async fn quick_start_of_the_readme_prints_its_output() {
    let mut node = Node::with_cuda_card().await;
    node.start_daemon();
    let mut cluster = Cluster { node, labels: Vec::new(), objects: Vec::new() };
    let (scripts, outputs) = (readme("sh"), readme("text"));
    assert_eq!((scripts.len(), outputs.len()), (1, 1));
    let output = cluster.run(scripts[0].replace("NODE", NODE)).await;
    let text = String::from_utf8_lossy(&output.stdout).replace(NODE, "NODE");
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(text, outputs[0]);

    // Pods on the node now get devices, and the container runtime finds the devices in the folder named in the quick
    // start.
    let node = cluster.node;
    let kubelet = node.kubelet(&["v1.DRAPlugin"]).await;
    until("a card that is served", async || {
        node.slice(1).await.spec.devices.unwrap()[0].taints.is_none().then_some(())
    })
    .await;
    node.api.put_claim(allocated("job", &[("gpu", "h100", "16Mi", "750")], Value::Null));
    let devices = kubelet.good(&named("job")).await;
    let files = fs::read_dir(node.path("cdi")).unwrap().map(|entry| fs::read(entry.unwrap().path()).unwrap());
    let specs: Vec<Spec> = files.map(|text| serde_json::from_slice(&text).unwrap()).collect();
    let found = |device: &String| {
        specs.iter().any(|spec| spec.devices.iter().any(|one| format!("{}={}", spec.kind, one.name) == *device))
    };
    assert_eq!(devices[0].cdi_device_ids.len(), 2, "NVIDIA's devices and the tenant");
    assert!(devices[0].cdi_device_ids.iter().all(found), "{:?}", devices[0].cdi_device_ids);
}
