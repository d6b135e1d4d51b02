//! Tests Podman containers with a tenant provided through the Container Device Interface.

use anyhow::{Result, ensure};
use tests::Debian;

use crate::site::{CONTAINERS, Form, WAIT_TIMEOUT, names, run_node, start_node, start_up};

/// Admin socket of the daemon with a CUDA card.
const SOCKET: &str = "/run/pods/admin.sock";
/// Command that builds an image from the host's own files: a program and its shared libraries.
const IMAGE: &str = "mkdir -p /tmp/image/usr/bin /tmp/image/tmp /tmp/image/etc && cp /usr/bin/cuda-program /tmp/image/usr/bin/ && \
    for file in $(/lib64/ld-linux-x86-64.so.2 --list /usr/bin/cuda-program | grep -o '/[^ ]*') /lib64/ld-linux-x86-64.so.2; do \
    mkdir -p /tmp/image/$(dirname $file) && cp -L $file /tmp/image/$file; done && \
    tar -C /tmp/image -c . | podman import - localhost/cuda-program:1 && rm -r /tmp/image";
/// Returns the command that runs the program in a container, with or without a claim.
fn command(claim: Option<&str>, arguments: &str) -> String {
    let device = claim.map_or_else(String::new, |name| format!("--device gpu-mediator.internal/share={name}"));
    format!(
        "podman run --rm --network=none --cgroups=disabled {device} --volume /run/pods/card:/run/pods/card \
         --env FAKE_CUDA_FOLDER=/run/pods/card --env FAKE_CUDA_MIB=1088 localhost/cuda-program:1 /usr/bin/cuda-program {arguments}"
    )
}

fn run(host: &Debian, claim: Option<&str>, arguments: &str) -> Result<tests::Output> {
    host.sh(&command(claim, arguments))
}

#[test]
fn podman_containers_get_their_claimed_tenant() -> Result<()> {
    let Some(host) = start_up("cdi", Form::Deb)? else { return Ok(()) };
    let host = &host;
    start_node(host, "pods")?;
    host.ok(CONTAINERS)?;
    host.ok(IMAGE)?;
    for (name, mib) in [("one", 256), ("two", 512)] {
        host.ok(&format!("mediatorctl --socket {SOCKET} tenant add {name} --vram-mib {mib}"))?;
        host.ok(&format!("mediatorctl --socket {SOCKET} tenant cdi {name} --driver /opt/fake/libcuda.so.1 --write"))?;
    }
    // Each container has its own tenant's quota on the same card.
    for (name, mib) in [("one", 256), ("two", 512)] {
        let filled = run(host, Some(name), "fill")?;
        ensure!(filled.code == 0, "a container with a claim: {}", filled.text());
        let got: u64 = filled.lines.last().map(|line| line.trim().parse()).transpose()?.unwrap_or(0);
        ensure!((mib - 32..=mib).contains(&got), "{name}: {got} MiB, expected nearly {mib}");
    }
    // A running container mounts the socket's folder, and therefore finds the next daemon after a restart.
    host.start("container", &command(Some("one"), "busy --kernel-us 1000 --ms 600000"))?;
    let served = |programs: u32| {
        format!("test $(mediatorctl --socket {SOCKET} --json tenant show one | grep -c '\"pid\"') = {programs}")
    };
    host.until("a program in a container", &served(1), WAIT_TIMEOUT)?;
    host.kill("pods")?;
    run_node(host, "pods")?;
    host.until("the program to find the next daemon", &served(1), WAIT_TIMEOUT)?;
    let beside = run(host, Some("one"), "look")?;
    ensure!(beside.code == 0, "a container after the restart: {}", beside.text());
    host.kill("container")?;
    let none = run(host, None, "fill")?;
    ensure!(none.code != 0 && none.text().contains("dlopen failed"), "a container without a claim: {}", none.text());
    let unknown = run(host, Some("three"), "fill")?;
    ensure!(unknown.code != 0 && unknown.text().contains("unresolvable CDI devices"), "{}", unknown.text());
    // A removed tenant cannot be claimed.
    for name in ["one", "two"] {
        host.ok(&format!("mediatorctl --socket {SOCKET} tenant cdi {name} --remove && mediatorctl --socket {SOCKET} tenant remove {name}"))?;
    }
    let gone = run(host, Some("one"), "fill")?;
    ensure!(gone.code != 0, "a removed claim: {}", gone.text());
    ensure!(names(host, SOCKET, "tenant")?.is_empty(), "tenants are left");
    host.stop("pods")
}
