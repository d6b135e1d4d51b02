//! Tests the driver process with a `mediatord` that has software cards: registration, slices, claims, restarts, and
//! failures.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::time::Duration;

use cdi_spec::Spec;
use fleet_grpc::dra::v1;
use fleet_grpc::health::v1alpha1::{HealthStatus, NodeWatchResourcesRequest};
use serde_json::{Value, json};

mod support;

use support::{CARD, Node, allocated, connect, named, parameters, until};

const NEW: &[&str] = &["v1.DRAPlugin", "v1beta1.DRAPlugin"];
const OLD: &[&str] = &["v1beta1.DRAPlugin"];

fn spec(node: &Node, uid: &str) -> Spec {
    let path = node.path("cdi").join(format!("gpu-mediator.internal-share_{uid}.json"));
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[tokio::test]
async fn two_pods_share_card_three_to_one_with_both_api_versions() {
    for versions in [NEW, OLD] {
        let node = Node::running(CARD).await;
        let kubelet = node.kubelet(versions).await;
        node.slice(1).await;
        node.api.put_claim(allocated("big", &[("gpu", "card0", "96Mi", "750")], Value::Null));
        node.api.put_claim(allocated("small", &[("gpu", "card0", "32Mi", "250")], Value::Null));
        let (big, small) = (named("big"), named("small"));
        let devices = kubelet.good(&big).await;
        let expected = v1::Device {
            request_names: vec!["gpu".to_owned()],
            pool_name: "node-a".to_owned(),
            device_name: "card0".to_owned(),
            cdi_device_ids: vec!["gpu-mediator.internal/share=uid-big-0".to_owned()],
        };
        assert_eq!(devices, [expected]);
        kubelet.good(&small).await;
        assert_eq!(node.shares().await, ["k8s-uid-big-0", "k8s-uid-small-0"]);

        // The daemon enforces the allocation and records the pod as a label.
        let shares: Value = node.admin().get("/v1/cards/card0/scheduler").await.unwrap();
        let entitled: Vec<_> =
            shares["vms"].as_array().unwrap().iter().map(|vm| vm["entitled_permille"].as_u64().unwrap()).collect();
        assert_eq!(entitled, [750, 250]);
        let vm: Value = node.admin().get("/v1/vms/k8s-uid-big-0").await.unwrap();
        assert_eq!(vm["vram_mib"], 96);
        assert_eq!(vm["labels"]["pod"], "pod-of-big");
        let metrics =
            node.admin().request(admin_client::Method::GET, "/metrics", Vec::new().into(), None).await.unwrap();
        let metrics = String::from_utf8(metrics.to_vec()).unwrap();
        let line = "gpu_mediator_vm_labels{vm=\"k8s-uid-big-0\",card=\"card0\",label_claim=\"big\",label_claim_uid=\"uid-big\",\
                    label_namespace=\"prod\",label_pod=\"pod-of-big\",label_request=\"gpu\"} 1";
        assert!(metrics.contains(line), "{metrics}");

        // A container gets only the folder of its own socket, and can connect as any user.
        let spec = spec(&node, "uid-big");
        let edits = &spec.devices[0].container_edits;
        assert_eq!(edits.env, ["GPU_MEDIATOR_VFIO_USER_SOCKET=/run/gpu-mediator/vgpu/gpu/vgpu.sock"]);
        let [mount, again] = edits.mounts.as_slice() else { panic!("{edits:?}") };
        assert_eq!(mount.host_path, node.path("claims/k8s-uid-big-0"));
        assert_eq!(again.host_path, mount.host_path);
        let socket = fs::metadata(mount.host_path.join("vgpu.sock")).unwrap();
        assert!(socket.file_type().is_socket());
        assert_eq!(socket.permissions().mode() & 0o777, 0o666);
        let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(node.path("claims")), mode(mount.host_path.clone())), (0o700, 0o755));

        // Repeating the request has no effect.
        let before: Value = node.admin().get("/v1/desired").await.unwrap();
        assert_eq!(kubelet.good(&big).await, devices);
        assert_eq!(node.admin().get::<Value>("/v1/desired").await.unwrap(), before);

        let events = until("events", async || Some(node.api.events()).filter(|events| events.len() >= 2)).await;
        let note = events[0].note.as_deref().unwrap();
        assert_eq!(note, "k8s-uid-big-0 created for claim big of pod pod-of-big in namespace prod");

        for claim in [&big, &small, &big] {
            kubelet.back(claim).await;
        }
        node.assert_clean().await;
    }
}

#[tokio::test]
async fn a_claim_of_several_shares_is_one_file_and_all_or_nothing() {
    let node = Node::running(&format!("{CARD}{}", CARD.replace("card0", "card1"))).await;
    let kubelet = node.kubelet(NEW).await;
    node.slice(2).await;
    let parts = [("gpu", "card0", "32Mi", "100"), ("gpu", "card0", "32Mi", "100"), ("other", "card1", "64Mi", "500")];
    node.api.put_claim(allocated("many", &parts, Value::Null));
    let devices = kubelet.good(&named("many")).await;
    let ids: Vec<_> = devices.iter().map(|device| device.cdi_device_ids[0].as_str()).collect();
    assert_eq!(ids, ["many-0", "many-1", "many-2"].map(|id| format!("gpu-mediator.internal/share=uid-{id}")));
    let places: Vec<_> =
        spec(&node, "uid-many").devices.iter().map(|d| d.container_edits.mounts[0].container_path.clone()).collect();
    let expected =
        ["gpu", "gpu-2", "other"].map(|place| std::path::PathBuf::from(format!("/run/gpu-mediator/vgpu/{place}")));
    assert_eq!(places, expected);
    kubelet.back(&named("many")).await;
    node.assert_clean().await;

    // The last share does not fit, because a VM unknown to the Kubernetes scheduler uses the card. The first two shares
    // are therefore removed as well.
    let beside = json!({ "name": "beside", "card": "card1", "vram_mib": 160 });
    node.admin().post::<Value>("/v1/vms", &beside).await.unwrap();
    let parts = [parts[0], parts[1], ("other", "card1", "128Mi", "500")];
    node.api.put_claim(allocated("none", &parts, Value::Null));
    let error = kubelet.bad(&named("none")).await;
    assert!(error.contains("128 MiB"), "{error}");
    assert_eq!(node.shares().await, ["beside"]);
    node.admin().delete("/v1/vms/beside").await.unwrap();
    node.assert_clean().await;
    // The claim fits now.
    kubelet.good(&named("none")).await;
    assert_eq!(node.shares().await.len(), 3);
}

#[tokio::test]
async fn a_container_with_two_claims_finds_the_shares_of_each() {
    let node = Node::running(CARD).await;
    let kubelet = node.kubelet(NEW).await;
    node.slice(1).await;
    let mut found = std::collections::BTreeMap::new();
    for claim in ["one", "two"] {
        node.api.put_claim(allocated(claim, &[("gpu", "card0", "32Mi", "100")], Value::Null));
        kubelet.good(&named(claim)).await;
        // Apply the mounts as a container runtime does: a later mount replaces an earlier mount at the same path.
        for mount in spec(&node, &format!("uid-{claim}")).devices.remove(0).container_edits.mounts {
            found.insert(mount.container_path.display().to_string(), mount.host_path);
        }
    }
    let of = |claim: &str| node.path(&format!("claims/k8s-uid-{claim}-0"));
    let expected = [("claims/one/gpu", "one"), ("claims/two/gpu", "two"), ("vgpu/gpu", "two")];
    let expected = expected.map(|(place, claim)| (format!("/run/gpu-mediator/{place}"), of(claim)));
    assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
    for claim in ["one", "two"] {
        kubelet.back(&named(claim)).await;
    }
    node.assert_clean().await;
}

#[tokio::test]
async fn invalid_or_excessive_claim_is_rejected_with_cause() {
    let node = Node::running(CARD).await;
    let kubelet = node.kubelet(NEW).await;
    node.slice(1).await;
    let part = [("gpu", "card0", "64Mi", "250")];
    let with = |set: Value| move |name: &str| allocated(name, &part, json!([set.clone()]));
    let plain = |change: fn(&mut Value)| {
        move |name: &str| {
            let mut claim = allocated(name, &part, Value::Null);
            change(&mut claim);
            claim
        }
    };
    type Make<'a> = Box<dyn Fn(&str) -> Value + 'a>;
    let cases: Vec<(Make<'_>, &str)> = vec![
        (
            Box::new(with(parameters("FromClaim", json!({ "memory": { "limit": "1Gi" } })))),
            "memory.limit: 1024Mi, expected at most the 224Mi of card `card0`",
        ),
        (
            Box::new(with(parameters("FromClaim", json!({ "memory": { "guarantee": "128Mi" } })))),
            "memory.guarantee: 128Mi, expected at most 64Mi: the allocated memory",
        ),
        (
            Box::new(with(parameters("FromClaim", json!({ "time": { "weight": 900 } })))),
            "time.weight: 900, expected 1 to 250",
        ),
        (
            Box::new(with(parameters("FromClaim", json!({ "time": { "class": "interactive" } })))),
            "only a device class can set",
        ),
        (Box::new(with(parameters("FromClaim", json!({ "speed": "high" })))), "unknown field `speed`"),
        (
            Box::new(|name: &str| allocated(name, &[("gpu", "card0", "4Gi", "250")], Value::Null)),
            "allocated memory: 4096 MiB, expected 1 to 224",
        ),
        (
            Box::new(|name: &str| allocated(name, &[("gpu", "card9", "64Mi", "250")], Value::Null)),
            "this node has no device `card9`",
        ),
        (Box::new(plain(|claim| claim["status"] = json!({}))), "the claim is not allocated"),
        (
            Box::new(plain(|claim| claim["status"]["allocation"]["devices"]["results"][0]["pool"] = "node-b".into())),
            "the claim has no allocation from driver `gpu-mediator.internal` and pool `node-a`",
        ),
        (Box::new(plain(|claim| claim["metadata"]["uid"] = "uid-another".into())), "another claim of that name"),
    ];
    for (number, (make, expected)) in cases.iter().enumerate() {
        let name = format!("bad-{number}");
        node.api.put_claim(make(&name));
        let error = kubelet.bad(&named(&name)).await;
        assert!(error.contains(expected), "{error}");
        // The kubelet retries, but the claim's owner receives only one event.
        assert_eq!(kubelet.bad(&named(&name)).await, error);
    }
    assert!(kubelet.bad(&named("absent")).await.contains("no such claim"));
    let told = cases.len() + 1;
    let events = until("events", async || Some(node.api.events()).filter(|events| events.len() >= told)).await;
    assert_eq!(events.len(), told);
    assert!(
        events
            .iter()
            .all(|event| event.type_.as_deref() == Some("Warning") && event.reason.as_deref() == Some("ShareRefused"))
    );
    node.assert_clean().await;
    // A device class may grant more than a claim may request.
    let class = parameters("FromClass", json!({ "time": { "weight": 900, "class": "interactive" } }));
    node.api.put_claim(allocated("good", &part, json!([class])));
    kubelet.good(&named("good")).await;
    let time: Value = node.admin().get("/v1/vms/k8s-uid-good-0/time").await.unwrap();
    assert_eq!((&time["weight"], &time["class"]), (&json!(900), &json!("interactive")));
}

#[tokio::test]
async fn claims_survive_driver_kill_and_daemon_state_loss() {
    let mut node = Node::running(CARD).await;
    let kubelet = node.kubelet(NEW).await;
    node.slice(1).await;
    node.api.put_claim(allocated("kept", &[("gpu", "card0", "64Mi", "250")], Value::Null));
    let devices = kubelet.good(&named("kept")).await;
    node.kill_driver();
    // Missing shares are recreated without the claim object, which may already have been removed.
    fs::remove_dir_all(node.path("cdi")).unwrap();
    node.api.remove_claim("prod", "kept");
    node.daemon = None;
    node.start_daemon();
    assert_eq!(node.shares().await, Vec::<String>::new());
    node.start_driver(&[]);
    let kubelet = node.kubelet(NEW).await;
    until("the share", async || (node.shares().await == ["k8s-uid-kept-0"]).then_some(())).await;
    assert_eq!(kubelet.good(&named("kept")).await, devices);
    assert_eq!(spec(&node, "uid-kept").devices.len(), 1);
    // While the daemon is not running, a claim cannot be unprepared, so it remains in the store.
    node.daemon = None;
    let answer = kubelet.unprepare(&[named("kept")]).await.unwrap();
    assert!(answer.claims["uid-kept"].error.contains("no daemon responds"), "{answer:?}");
    node.start_daemon();
    kubelet.back(&named("kept")).await;
    node.assert_clean().await;
}

#[tokio::test]
async fn driver_killed_during_prepare_leaves_no_unknown_share() {
    let mut node = Node::running(CARD).await;
    let names: Vec<String> = (0..6).map(|number| format!("c{number}")).collect();
    let claims: Vec<_> = names.iter().map(|name| named(name)).collect();
    for name in &names {
        node.api.put_claim(allocated(
            name,
            &[("gpu", "card0", "16Mi", "100"), ("gpu", "card0", "16Mi", "10")],
            Value::Null,
        ));
    }
    for killed_after in [1, 4, 9] {
        let kubelet = node.kubelet(NEW).await;
        node.slice(1).await;
        let asked = claims.clone();
        let preparing = tokio::spawn(async move { kubelet.prepare(&asked).await });
        until("some shares", async || (node.shares().await.len() >= killed_after).then_some(())).await;
        node.kill_driver();
        let _ = preparing.await.unwrap();
        node.start_driver(&[]);
        let kubelet = node.kubelet(NEW).await;
        node.slice(1).await;
        // The kubelet repeats the request for half of the claims.
        until("the cards", async || {
            let answer = kubelet.prepare(&claims[..3]).await.unwrap();
            answer.claims.values().all(|one| one.error.is_empty()).then_some(())
        })
        .await;
        assert_eq!(node.shares().await.iter().filter(|name| name.contains("uid-c1-")).count(), 2);
        let answer = kubelet.unprepare(&claims).await.unwrap();
        assert!(answer.claims.len() == 6 && answer.claims.values().all(|one| one.error.is_empty()), "{answer:?}");
        node.assert_clean().await;
    }
}

#[tokio::test]
async fn the_slice_is_kept_as_the_cards_are() {
    let mut node = Node::new(CARD).await;
    let stale = json!({ "metadata": { "name": "old" }, "spec": { "driver": "gpu-mediator.internal", "nodeName": "node-a",
        "pool": { "name": "node-a", "generation": 7, "resourceSliceCount": 1 }, "devices": [] } });
    node.api.put_slice(stale);
    node.start_daemon();
    node.start_driver(&[]);
    let slice = node.slice(1).await;
    assert_eq!(slice.metadata.owner_references.as_ref().unwrap()[0].uid, "uid-of-node");
    let device = &slice.spec.devices.as_ref().unwrap()[0];
    assert_eq!((device.name.as_str(), device.allow_multiple_allocations), ("card0", Some(true)));
    let capacity = device.capacity.as_ref().unwrap();
    assert_eq!((capacity["memory"].value.0.as_str(), capacity["time"].value.0.as_str()), ("224Mi", "1000"));
    let attributes = device.attributes.as_ref().unwrap();
    assert_eq!(attributes["kind"].string.as_deref(), Some("simgpu"));
    assert_eq!(attributes["schedulerPolicy"].string.as_deref(), Some("band"));
    assert_eq!(attributes["memoryPolicy"].string.as_deref(), Some("random"));
    assert_eq!(attributes["model"].string.as_deref(), Some("GF100"));
    assert_eq!(attributes["vramMiB"].int, Some(256));
    until("the old slice is deleted", async || (node.api.slices().len() == 1).then_some(())).await;

    // A kubelet removes the slice when it starts.
    node.api.wipe();
    let again = node.slice(1).await;
    assert_eq!(again.spec.devices, slice.spec.devices);
    assert!(again.spec.pool.generation > slice.spec.pool.generation);

    // If nothing changes, the driver writes no objects.
    let writes = node.api.writes();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(node.api.writes(), writes);

    // The driver retries after an error from the API server.
    node.api.break_down(true);
    node.api.wipe();
    tokio::time::sleep(Duration::from_millis(300)).await;
    node.api.break_down(false);
    node.slice(1).await;
}

#[tokio::test]
async fn cards_without_daemon_are_tainted_and_reject_claims() {
    let mut node = Node::running(CARD).await;
    let taint = |slice: k8s_openapi::api::resource::v1::ResourceSlice| {
        let taints = slice.spec.devices.unwrap().remove(0).taints;
        taints.map(|taints| (taints[0].key.clone(), taints[0].value.clone().unwrap()))
    };
    assert_eq!(taint(node.slice(1).await), None);
    let kubelet = node.kubelet(NEW).await;
    let channel = kubelet.channel.clone();
    let mut client =
        fleet_grpc::health::v1beta1::dra_resource_health_client::DraResourceHealthClient::new(channel.clone());
    let mut old = fleet_grpc::health::v1alpha1::dra_resource_health_client::DraResourceHealthClient::new(channel);
    let mut stream = client.node_watch_resources(NodeWatchResourcesRequest {}).await.unwrap().into_inner();
    let mut other = old.node_watch_resources(NodeWatchResourcesRequest {}).await.unwrap().into_inner();
    let first = stream.message().await.unwrap().unwrap().devices;
    assert_eq!((first.len(), first[0].health()), (1, HealthStatus::Healthy));
    assert_eq!(other.message().await.unwrap().unwrap().devices.len(), 1);

    // The state of the devices is unknown until the daemon responds again.
    node.daemon = None;
    until("news", async || {
        let devices = stream.message().await.unwrap().unwrap().devices;
        (devices[0].health() == HealthStatus::Unknown).then_some(())
    })
    .await;
    let expected = ("gpu-mediator.internal/unusable".to_owned(), "unreachable".to_owned());
    until("a taint", async || (taint(node.slice(1).await).as_ref() == Some(&expected)).then_some(())).await;
    node.api.put_claim(allocated("late", &[("gpu", "card0", "16Mi", "250")], Value::Null));
    let error = kubelet.bad(&named("late")).await;
    assert!(error.contains("card `card0` cannot be used: mediatord does not respond"), "{error}");
    node.start_daemon();
    until("no taint", async || taint(node.slice(1).await).is_none().then_some(())).await;
    kubelet.good(&named("late")).await;
    kubelet.back(&named("late")).await;

    // If a cluster does not store taints, the driver omits unusable cards from the slice.
    node.api.forget(&["taints"]);
    node.daemon = None;
    node.slice(0).await;
    assert!(node.log("driver.log").contains("does not support device taints"));
}

#[tokio::test]
async fn drained_card_is_tainted_and_rejects_only_new_claims() {
    let node = Node::running(CARD).await;
    let kubelet = node.kubelet(NEW).await;
    node.slice(1).await;
    for name in ["kept", "late"] {
        node.api.put_claim(allocated(name, &[("gpu", "card0", "16Mi", "250")], Value::Null));
    }
    let devices = kubelet.good(&named("kept")).await;
    let taint = async || {
        let taints = node.slice(1).await.spec.devices.unwrap().remove(0).taints;
        taints.map(|taints| (taints[0].value.clone().unwrap(), taints[0].effect.clone()))
    };
    node.admin().post::<Value>("/v1/cards/card0/drain", &()).await.unwrap();
    let drained = ("drained".to_owned(), "NoSchedule".to_owned());
    until("a taint", async || (taint().await.as_ref() == Some(&drained)).then_some(())).await;
    let error = kubelet.bad(&named("late")).await;
    assert!(error.contains("card `card0` cannot be used: an operator is draining it"), "{error}");
    // Existing users keep the card. The driver reports the card as healthy, so that their pods are not terminated.
    assert_eq!(kubelet.good(&named("kept")).await, devices);
    let mut client =
        fleet_grpc::health::v1beta1::dra_resource_health_client::DraResourceHealthClient::new(kubelet.channel.clone());
    let mut stream = client.node_watch_resources(NodeWatchResourcesRequest {}).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap().unwrap().devices[0].health(), HealthStatus::Healthy);
    node.admin().post::<Value>("/v1/cards/card0/undrain", &()).await.unwrap();
    until("no taint", async || taint().await.is_none().then_some(())).await;
    kubelet.good(&named("late")).await;
    kubelet.back(&named("late")).await;
    kubelet.back(&named("kept")).await;
    node.assert_clean().await;
}

#[tokio::test]
async fn claim_of_vm_moved_to_another_card_stays_valid() {
    let node = Node::running(&(CARD.to_owned() + &CARD.replace("card0", "card1"))).await;
    let kubelet = node.kubelet(NEW).await;
    node.slice(2).await;
    for name in ["moved", "drained"] {
        node.api.put_claim(allocated(name, &[("gpu", "card0", "16Mi", "250")], Value::Null));
        let devices = kubelet.good(&named(name)).await;
        if name == "moved" {
            let to = json!({ "card": "card1" });
            node.admin().post::<Value>("/v1/vms/k8s-uid-moved-0/move", &to).await.unwrap();
        } else {
            node.admin().post::<Value>("/v1/cards/card0/drain", &()).await.unwrap();
        }
        let vm: Value = node.admin().get(&format!("/v1/vms/k8s-uid-{name}-0")).await.unwrap();
        assert_eq!(vm["card"], "card1");
        // A restarted kubelet repeats its request.
        assert_eq!(kubelet.good(&named(name)).await, devices);
        kubelet.back(&named(name)).await;
        assert_eq!(node.shares().await, Vec::<String>::new(), "the returned share no longer exists");
    }
    node.assert_clean().await;
}

/// Tests an attack in which the daemon's user, who owns the parent folder, replaces the folder of all shares with a
/// symbolic link.
#[tokio::test]
async fn a_link_in_the_place_of_the_folder_of_shares_is_not_followed() {
    let node = Node::running(CARD).await;
    let kubelet = node.kubelet(NEW).await;
    node.slice(1).await;
    let victim = node.path("victim");
    fs::create_dir(&victim).unwrap();
    fs::set_permissions(&victim, fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::symlink(&victim, node.path("claims")).unwrap();
    node.api.put_claim(allocated("a", &[("gpu", "card0", "16Mi", "250")], Value::Null));
    let error = kubelet.bad(&named("a")).await;
    assert!(error.contains("the folder for the sockets cannot be created"), "{error}");
    assert_eq!(fs::metadata(&victim).unwrap().permissions().mode() & 0o777, 0o755);
    assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);
    fs::remove_file(node.path("claims")).unwrap();
    kubelet.good(&named("a")).await;
    kubelet.back(&named("a")).await;
    node.assert_clean().await;
}

#[tokio::test]
async fn a_cluster_without_parts_of_devices_gives_a_whole_card() {
    let node = Node::new(CARD).await;
    node.api.forget(&["allowMultipleAllocations"]);
    let mut node = node;
    node.start_daemon();
    node.start_driver(&[]);
    let kubelet = node.kubelet(NEW).await;
    let slice = node.slice(1).await;
    assert_eq!(slice.spec.devices.unwrap()[0].allow_multiple_allocations, None);
    let writes = node.api.writes();
    let mut claim = allocated("whole", &[("gpu", "card0", "64Mi", "250")], Value::Null);
    let result = claim["status"]["allocation"]["devices"]["results"][0].as_object_mut().unwrap();
    result.remove("consumedCapacity");
    result.remove("shareID");
    node.api.put_claim(claim);
    kubelet.good(&named("whole")).await;
    let vm: Value = node.admin().get("/v1/vms/k8s-uid-whole-0").await.unwrap();
    assert_eq!(vm["vram_mib"], 224);
    assert_eq!(node.api.writes(), writes, "what the server leaves out is not written again and again");
}

#[tokio::test]
async fn junk_is_refused_and_changes_nothing() {
    let node = Node::running(CARD).await;
    let kubelet = node.kubelet(NEW).await;
    node.slice(1).await;
    for uid in ["", "../../etc/passwd", "a/b", "a b", &"u".repeat(200), "uid\n", "-"] {
        let claim = v1::Claim { namespace: "prod".to_owned(), uid: uid.to_owned(), name: "x".to_owned() };
        assert!(kubelet.bad(&claim).await.contains("is not a UID"), "{uid:?}");
        let answer = kubelet.unprepare(&[claim]).await.unwrap();
        assert!(answer.claims[uid].error.contains("is not a UID"));
    }
    let odd = v1::Claim { namespace: "../..".to_owned(), uid: "u".to_owned(), name: "../../nodes".to_owned() };
    kubelet.bad(&odd).await;
    let many: Vec<_> = (0..300).map(|number| named(&number.to_string())).collect();
    assert_eq!(kubelet.prepare(&many).await.unwrap_err().code(), tonic::Code::InvalidArgument);
    // Unpreparing an unknown claim succeeds immediately.
    kubelet.back(&named("never")).await;
    // A VM has the same name as a share, but a different owner.
    let other = json!({ "name": "k8s-uid-mine-0", "card": "card0", "vram_mib": 16 });
    node.admin().post::<Value>("/v1/vms", &other).await.unwrap();
    node.api.put_claim(allocated("mine", &[("gpu", "card0", "16Mi", "10")], Value::Null));
    let error = kubelet.bad(&named("mine")).await;
    assert!(error.contains("belongs to another owner"), "{error}");
    kubelet.back(&named("mine")).await;
    assert_eq!(node.shares().await, ["k8s-uid-mine-0"], "it stays");
}

#[tokio::test]
async fn kubelet_request_with_path_authority_is_answered() {
    use std::io::{Read, Write};
    let node = Node::running(CARD).await;
    let socket = node.path("kubelet/plugins_registry/gpu-mediator.internal-reg.sock");
    connect(&socket).await;
    let hex: String = include_str!("../../grpc/tests/captures/path.hex").split_whitespace().collect();
    let bytes: Vec<u8> =
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
    let answer = tokio::task::spawn_blocking(move || {
        let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(support::WAIT_TIMEOUT)).unwrap();
        stream.write_all(&bytes).unwrap();
        let mut all = Vec::new();
        let mut some = [0; 4096];
        while !String::from_utf8_lossy(&all).contains("v1beta1.DRAPlugin") {
            let count = stream.read(&mut some).unwrap();
            assert!(count > 0, "{:?}", String::from_utf8_lossy(&all));
            all.extend_from_slice(&some[..count]);
        }
        String::from_utf8_lossy(&all).into_owned()
    });
    let answer = answer.await.unwrap();
    assert!(answer.contains("DRAPlugin") && answer.contains("plugins/gpu-mediator.internal/dra.sock"), "{answer}");
    until("registered", async || node.log("driver.log").contains("has registered the driver").then_some(())).await;
}

#[tokio::test]
async fn a_driver_that_cannot_work_says_why_and_ends() {
    let node = Node::new(CARD).await;
    let failed = |mut command: std::process::Command| {
        let output = command.output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let kept = node.path("kubelet/plugins/gpu-mediator.internal");
    fs::create_dir_all(&kept).unwrap();
    fs::write(kept.join("claims.json"), "junk").unwrap();
    let text = failed(node.driver(&[]));
    assert!(text.contains("claims.json is not a list of prepared claims") && text.contains("move it away"), "{text}");
    fs::remove_file(kept.join("claims.json")).unwrap();
    fs::remove_dir_all(node.path("kubelet/plugins_registry")).unwrap();
    let text = failed(node.driver(&[]));
    assert!(text.contains("is --kubelet-root"), "{text}");
    let mut command = node.driver(&[]);
    command
        .env("KUBECONFIG", node.path("absent"))
        .env_remove("KUBERNETES_SERVICE_HOST")
        .env("HOME", node.folder.path());
    let text = failed(command);
    assert!(text.contains("run this in a pod, or set KUBECONFIG"), "{text}");
    let text = failed(node.driver(&["--metrics", "everywhere"]));
    assert!(text.contains("--metrics") && text.contains("invalid socket address"), "{text}");
}

#[tokio::test]
async fn stopped_driver_removes_sockets_and_keeps_claims() {
    let mut node = Node::running(CARD).await;
    let kubelet = node.kubelet(NEW).await;
    node.slice(1).await;
    node.api.put_claim(allocated("kept", &[("gpu", "card0", "64Mi", "250")], Value::Null));
    kubelet.good(&named("kept")).await;
    let mut driver = node.driver.take().unwrap();
    let pid = driver.0.id().to_string();
    assert!(std::process::Command::new("kill").arg(&pid).status().unwrap().success());
    assert!(driver.0.wait().unwrap().success());
    assert!(!node.path("kubelet/plugins_registry/gpu-mediator.internal-reg.sock").exists());
    assert!(!node.path("kubelet/plugins/gpu-mediator.internal/dra.sock").exists());
    assert_eq!(node.shares().await, ["k8s-uid-kept-0"], "the pod continues");
}

#[tokio::test]
async fn metrics_name_pod_claim_and_namespace() {
    let mut node = Node::new(CARD).await;
    node.start_daemon();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("127.0.0.1:{port}");
    node.start_driver(&["--metrics", &address]);
    let kubelet = node.kubelet(NEW).await;
    node.slice(1).await;
    node.api.put_claim(allocated("seen", &[("gpu", "card0", "64Mi", "250")], Value::Null));
    kubelet.good(&named("seen")).await;
    let get = |path: &str| {
        use std::io::{Read, Write};
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(support::WAIT_TIMEOUT)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    let text = get("/metrics");
    let line = "gpu_mediator_dra_share{namespace=\"prod\",claim=\"seen\",claim_uid=\"uid-seen\",pod=\"pod-of-seen\",\
                share=\"k8s-uid-seen-0\",card=\"card0\"} 1";
    assert!(text.contains(line), "{text}");
    assert!(text.contains("gpu_mediator_dra_prepare_total{result=\"good\"} 1"), "{text}");
    assert!(text.contains("gpu_mediator_dra_daemon_up 1") && text.contains("gpu_mediator_dra_registered 1"), "{text}");
    assert!(get("/healthz").ends_with("ok\n"));
}
