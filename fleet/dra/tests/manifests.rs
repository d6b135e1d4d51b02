//! Tests that the manifests and the image recipe use only published types, necessary permissions, and existing
//! arguments.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaimTemplate};
use serde_json::Value;

mod support;

use support::api_server::typed;
use support::manifests::{documents, folder, published};
use support::{CARD, Node, allocated, named, until};

fn one(kind: &str) -> Value {
    documents(&folder()).into_iter().find(|document| document["kind"] == kind).unwrap()
}

#[test]
fn unknown_kubernetes_fields_are_detected() {
    let slice = |more: (&str, Value)| {
        let mut slice = serde_json::json!({ "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": { "name": "a" },
            "spec": { "driver": "d", "pool": { "name": "p", "generation": 1, "resourceSliceCount": 1 } } });
        slice["spec"][more.0] = more.1;
        std::panic::catch_unwind(|| drop(typed::<k8s_openapi::api::resource::v1::ResourceSlice>(&slice)))
            .map_err(|panic| panic.downcast_ref::<String>().cloned().unwrap_or_default())
    };
    assert_eq!(slice(("allNodes", true.into())), Ok(()));
    let text = slice(("partitionTypeAttribute", "kind".into())).unwrap_err();
    assert!(text.contains("fields that the type does not have"), "{text}");
}

#[test]
fn every_document_is_of_a_published_type() {
    let mut kinds = BTreeSet::new();
    for document in [documents(&folder()), documents(&folder().join("example"))].concat() {
        kinds.insert(published(&document).to_owned());
    }
    assert_eq!(kinds.len(), 10);
}

#[test]
fn device_classes_name_driver_and_valid_parameters() {
    let classes: Vec<DeviceClass> =
        documents(&folder()).iter().filter(|document| document["kind"] == "DeviceClass").map(typed).collect();
    for class in classes {
        let spec = class.spec.unwrap();
        let expression = &spec.selectors.as_ref().unwrap()[0].cel.as_ref().unwrap().expression;
        assert!(expression.contains(&format!("device.driver == \"{}\"", fleet_dra::DRIVER)), "{expression}");
        for set in spec.config.iter().flatten() {
            let opaque = set.opaque.clone().unwrap();
            let set = k8s_openapi::api::resource::v1::DeviceAllocationConfiguration {
                opaque: Some(opaque),
                requests: None,
                source: "FromClass".to_owned(),
            };
            fleet_dra::parameters::applied(&[set], "gpu").unwrap();
        }
    }
}

#[test]
fn the_example_asks_for_one_card_three_to_one() {
    let templates = documents(&folder().join("example"));
    let templates = templates.iter().filter(|document| document["kind"] == "ResourceClaimTemplate");
    let mut times = Vec::new();
    for template in templates.map(typed::<ResourceClaimTemplate>) {
        let devices = template.spec.unwrap().spec.unwrap().devices.unwrap();
        let exactly = devices.requests.unwrap().remove(0).exactly.unwrap();
        assert!(
            documents(&folder())
                .iter()
                .any(|document| document["metadata"]["name"] == exactly.device_class_name.as_str())
        );
        let asked = exactly.capacity.unwrap().requests.unwrap();
        assert!(fleet_dra::quantity::mib(&asked["memory"].0).unwrap() > 0);
        times.push(fleet_dra::quantity::whole(&asked["time"].0).unwrap());
        let sets = devices.config.into_iter().flatten().map(|set| {
            k8s_openapi::api::resource::v1::DeviceAllocationConfiguration {
                opaque: set.opaque,
                requests: set.requests,
                source: "FromClaim".to_owned(),
            }
        });
        fleet_dra::parameters::applied(&sets.collect::<Vec<_>>(), "gpu").unwrap();
    }
    assert_eq!(times, [750, 250]);
}

#[tokio::test]
async fn cluster_role_allows_exactly_calls_made_by_driver() {
    let mut node = Node::new(CARD).await;
    node.api.put_slice(serde_json::json!({ "metadata": { "name": "old" }, "spec": { "driver": "gpu-mediator.internal",
        "nodeName": "node-a", "pool": { "name": "node-a", "generation": 1, "resourceSliceCount": 1 }, "devices": [] } }));
    node.start_daemon();
    node.start_driver(&[]);
    let kubelet = node.kubelet(&["v1.DRAPlugin"]).await;
    node.slice(1).await;
    node.api.put_claim(allocated("one", &[("gpu", "card0", "64Mi", "250")], Value::Null));
    kubelet.good(&named("one")).await;
    kubelet.back(&named("one")).await;
    // The driver changes the slice when the daemon is unreachable.
    node.daemon = None;
    until("a taint", async || node.slice(1).await.spec.devices.unwrap()[0].taints.clone()).await;
    let calls =
        until("an event", async || Some(node.api.calls()).filter(|calls| calls.iter().any(|c| c.2 == "events"))).await;

    let role: ClusterRole = typed(&one("ClusterRole"));
    let mut allowed = BTreeSet::new();
    for rule in role.rules.unwrap() {
        assert!(rule.non_resource_urls.is_none());
        for group in rule.api_groups.unwrap() {
            for resource in rule.resources.as_ref().unwrap() {
                allowed.extend(rule.verbs.iter().map(|verb| (verb.clone(), group.clone(), resource.clone())));
            }
        }
    }
    let asked: BTreeSet<_> =
        calls.into_iter().map(|(verb, group, kind)| (verb.to_owned(), group.to_owned(), kind.to_owned())).collect();
    assert_eq!(asked, allowed);
}

#[test]
fn the_policy_is_about_the_account_that_the_driver_has() {
    let set: DaemonSet = typed(&one("DaemonSet"));
    let account = set.spec.template.spec.unwrap().service_account_name.unwrap();
    let policy: ValidatingAdmissionPolicy = typed(&one("ValidatingAdmissionPolicy"));
    let spec = policy.spec.unwrap();
    let condition = &spec.match_conditions.unwrap()[0].expression;
    assert!(condition.contains(&format!("system:serviceaccount:gpu-mediator:{account}")), "{condition}");
    let binding: ValidatingAdmissionPolicyBinding = typed(&one("ValidatingAdmissionPolicyBinding"));
    assert_eq!(Some(binding.spec.policy_name), policy.metadata.name);
    let roles: ClusterRoleBinding = typed(&one("ClusterRoleBinding"));
    assert_eq!(roles.subjects.unwrap()[0].name, account);
}

#[test]
fn the_image_has_the_program_and_the_program_the_arguments() {
    let set: DaemonSet = typed(&one("DaemonSet"));
    let spec = set.spec.template.spec.unwrap();
    let container = &spec.containers[0];
    let recipe = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../Containerfile")).unwrap();
    // Another test checks that the package contains the program. A third test builds the image from the package.
    let package = concat!("COPY gpu-mediator-kubernetes_", env!("CARGO_PKG_VERSION"), "_amd64.deb ");
    assert!(recipe.lines().any(|line| line.starts_with(package)), "{recipe}");
    let program = &container.command.as_ref().unwrap()[0];
    assert!(recipe.lines().any(|line| line == format!("ENTRYPOINT [\"{program}\"]")), "{recipe}");
    let arguments = container.args.as_ref().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_gpu-mediator-dra"))
        .args(arguments)
        .args(["--look-every-ms=0"])
        .env("NODE_NAME", "a")
        .output()
        .unwrap();
    // The program must accept all arguments except the last one.
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("--look-every-ms") && !text.contains("unexpected argument"), "{text}");
    // The folders that the driver uses must be mounted at the same paths as on the node.
    let mounts = container.volume_mounts.as_ref().unwrap();
    let volumes = spec.volumes.as_ref().unwrap();
    for path in ["/var/lib/kubelet/plugins", "/var/lib/kubelet/plugins_registry", "/var/run/cdi", "/run/gpu-mediator"] {
        let mount = mounts.iter().find(|mount| mount.mount_path == path).unwrap();
        let volume = volumes.iter().find(|volume| volume.name == mount.name).unwrap();
        assert_eq!(volume.host_path.as_ref().unwrap().path, path, "the kubelet and mediatord see the same path");
    }
}
