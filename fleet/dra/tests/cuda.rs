//! Tests a claim for a CUDA card with the fake driver: creates a tenant, and runs a program that uses the tenant as a
//! program in a container does.

use std::path::Path;
use std::process::Command;

use cdi_spec::{Edits, Spec};
use serde_json::{Value, json};

mod support;

use support::{Node, allocated, built, named, parameters};

/// Returns the environment of a container, with host paths instead of container paths.
fn environment(edits: &Edits) -> Vec<(String, String)> {
    let outside = |value: &str| {
        let mount = edits.mounts.iter().find(|mount| Path::new(value).starts_with(&mount.container_path));
        let outside = mount.map(|mount| {
            let rest = Path::new(value).strip_prefix(&mount.container_path).unwrap();
            if rest.as_os_str().is_empty() { mount.host_path.clone() } else { mount.host_path.join(rest) }
        });
        outside.map_or_else(|| value.to_owned(), |path| path.display().to_string())
    };
    let pairs = edits.env.iter().map(|pair| pair.split_once('=').unwrap());
    pairs.map(|(name, value)| (name.to_owned(), outside(value))).collect()
}

#[tokio::test]
async fn cuda_claim_creates_tenant_and_programs_see_its_limit() {
    let mut node = Node::with_cuda_card().await;
    let driver = node.path("plain/libcuda.so.1");
    node.start_daemon();
    let (library, driver) = (node.path("shim").display().to_string(), driver.display().to_string());
    node.start_driver(&[
        "--cuda-library",
        &library,
        "--driver-library",
        &driver,
        "--with-cdi-device",
        "nvidia.com/gpu=all",
    ]);
    let kubelet = node.kubelet(&["v1.DRAPlugin"]).await;
    let slice = support::until("a card that is served", async || {
        let slice = node.slice(1).await;
        slice.spec.devices.as_ref().unwrap()[0].taints.is_none().then_some(slice)
    })
    .await;
    let device = &slice.spec.devices.unwrap()[0];
    assert_eq!(device.attributes.as_ref().unwrap()["share"].string.as_deref(), Some("tenant"));
    assert_eq!(device.capacity.as_ref().unwrap()["memory"].value.0, "64Mi");

    let set = parameters("FromClaim", json!({ "memory": { "limit": "32Mi", "swapCap": "16Mi" } }));
    node.api.put_claim(allocated("job", &[("gpu", "h100", "16Mi", "750")], json!([set])));
    let devices = kubelet.good(&named("job")).await;
    assert_eq!(devices[0].cdi_device_ids, ["nvidia.com/gpu=all", "gpu-mediator.internal/share=uid-job-0"]);
    let tenant: Value = node.admin().get("/v1/tenants/k8s-uid-job-0").await.unwrap();
    assert_eq!((&tenant["vram_mib"], &tenant["memory"]["guarantee_mib"]), (&json!(32), &json!(16)));
    assert_eq!((&tenant["memory"]["swap_cap_mib"], &tenant["time"]["weight"]), (&json!(16), &json!(750)));
    assert_eq!(tenant["labels"]["namespace"], "prod");

    let path = node.path("cdi/gpu-mediator.internal-share_uid-job.json");
    let spec: Spec = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let output = Command::new(built("cuda-program"))
        .arg("look")
        .envs(node.variables.iter().cloned())
        .envs(environment(&spec.devices[0].container_edits))
        .output()
        .unwrap();
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("total=32"), "{text}{errors}");
    kubelet.back(&named("job")).await;
    node.assert_clean().await;

    // The owner process exits and cannot be restarted. Therefore, the card fails, and claims for it cannot be prepared.
    std::fs::remove_file(node.path("plain/libcuda.so.1")).unwrap();
    let pid = node.daemon.as_ref().unwrap().0.id();
    let owners = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    for owner in owners.split_whitespace() {
        assert!(Command::new("kill").args(["-KILL", owner]).status().unwrap().success());
    }
    let taint = support::until("a taint", async || {
        let device = node.slice(1).await.spec.devices.unwrap().remove(0);
        device.taints.and_then(|taints| taints[0].value.clone())
    })
    .await;
    assert_eq!(taint, "failed");
    node.api.put_claim(allocated("late", &[("gpu", "h100", "16Mi", "250")], Value::Null));
    let error = kubelet.bad(&named("late")).await;
    assert!(error.contains("card `h100` cannot be used"), "{error}");
}
