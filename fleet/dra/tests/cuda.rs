//! Tests claims for CUDA cards with the fake driver. The test programs use the tenants as programs in containers do.

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

    // The owner process is killed and cannot restart without its driver library. The card therefore fails, and claims
    // for it cannot be prepared.
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

#[tokio::test]
async fn cards_of_one_request_become_one_tenant() {
    let mut node = Node::with_cuda_card().await;
    node.add_second_card();
    let driver = node.path("plain/libcuda.so.1").display().to_string();
    node.start_daemon();
    let library = node.path("shim").display().to_string();
    node.start_driver(&[
        "--cuda-library",
        &library,
        "--driver-library",
        &driver,
        "--with-cdi-device",
        "nvidia.com/gpu=all",
    ]);
    let kubelet = node.kubelet(&["v1.DRAPlugin"]).await;
    support::until("cards that are served", async || {
        let devices = node.slice(2).await.spec.devices.unwrap();
        devices.iter().all(|device| device.taints.is_none()).then_some(())
    })
    .await;
    let parts = [("gpu", "h100", "16Mi", "250"), ("gpu", "h200", "16Mi", "250"), ("one", "h100", "16Mi", "500")];
    let set = parameters("FromClaim", json!({ "time": { "weight": 40 } }));
    node.api.put_claim(allocated("train", &parts, json!([set])));
    let devices = kubelet.good(&named("train")).await;
    let found: Vec<_> =
        devices.iter().map(|device| (device.device_name.as_str(), device.cdi_device_ids.len())).collect();
    assert_eq!(found, [("h100", 2), ("h200", 0), ("h100", 2)]);
    assert_eq!(devices[0].cdi_device_ids[1], "gpu-mediator.internal/share=uid-train-0");
    assert_eq!(node.shares().await, ["k8s-uid-train-0", "k8s-uid-train-1"]);
    let tenant: Value = node.admin().get("/v1/tenants/k8s-uid-train-0").await.unwrap();
    assert_eq!((&tenant["cards"], &tenant["vram_mib"]), (&json!(["h100", "h200"]), &json!(16)));
    assert_eq!((&tenant["time"]["weight"], &tenant["memory"]["guarantee_mib"]), (&json!(40), &json!(16)));

    // A program in the container sees both cards, with the claim's part of each.
    let path = node.path("cdi/gpu-mediator.internal-share_uid-train.json");
    let spec: Spec = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(spec.devices.len(), 2);
    let edits = &spec.devices[0].container_edits;
    assert!(
        edits.env.contains(
            &"GPU_MEDIATOR_CUDA_SOCKET=/run/gpu-mediator/cuda/gpu/h100.sock:/run/gpu-mediator/cuda/gpu/h200.sock"
                .to_owned()
        )
    );
    // `environment` converts only the first path in this list, so the test sets the host paths of both sockets.
    let sockets = ["h100", "h200"].map(|card| node.path(&format!("claims/k8s-uid-train-0/{card}.sock")));
    let sockets = sockets.map(|path| path.display().to_string()).join(":");
    let output = Command::new(built("cuda-cards"))
        .arg("look")
        .envs(node.variables.iter().cloned())
        .envs(environment(edits))
        .env("GPU_MEDIATOR_CUDA_SOCKET", sockets)
        .output()
        .unwrap();
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let seen: Value = serde_json::from_str(text.trim()).unwrap_or_else(|_| panic!("{text}{errors}"));
    let sizes: Vec<_> = seen.as_array().unwrap().iter().map(|device| device[2].clone()).collect();
    assert_eq!(sizes, [16, 16]);

    // A repeated request changes nothing, even after the driver was killed.
    let before: Value = node.admin().get("/v1/desired").await.unwrap();
    assert_eq!(kubelet.good(&named("train")).await, devices);
    node.kill_driver();
    node.start_driver(&[
        "--cuda-library",
        &library,
        "--driver-library",
        &driver,
        "--with-cdi-device",
        "nvidia.com/gpu=all",
    ]);
    let kubelet = node.kubelet(&["v1.DRAPlugin"]).await;
    assert_eq!(kubelet.good(&named("train")).await, devices);
    assert_eq!(node.admin().get::<Value>("/v1/desired").await.unwrap(), before);

    // A claim that fails because one of its cards has too little memory leaves nothing behind.
    let beside = json!({ "name": "beside", "card": "h200", "vram_mib": 32, "memory": { "guarantee_mib": 32 } });
    node.admin().post::<Value>("/v1/tenants", &beside).await.unwrap();
    let parts = [("gpu", "h100", "32Mi", "250"), ("gpu", "h200", "32Mi", "250")];
    node.api.put_claim(allocated("large", &parts, Value::Null));
    let error = kubelet.bad(&named("large")).await;
    assert!(error.contains("expected at most the 16 MiB of card `h200`"), "{error}");
    for (name, parts, expected) in [
        ("twice", [parts[0], parts[0]], "several of its devices are the card `h100`"),
        ("unequal", [("gpu", "h100", "8Mi", "250"), ("gpu", "h200", "16Mi", "250")], "`h100` and `h200` differ"),
    ] {
        node.api.put_claim(allocated(name, &parts, Value::Null));
        let error = kubelet.bad(&named(name)).await;
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(node.shares().await, ["beside", "k8s-uid-train-0", "k8s-uid-train-1"]);
    node.admin().delete("/v1/tenants/beside").await.unwrap();
    kubelet.back(&named("train")).await;
    kubelet.back(&named("train")).await;
    node.assert_clean().await;
}
