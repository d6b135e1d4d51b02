//! Renders the manifests in `fleet/kubernetes` as `kubectl` does.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaimTemplate};
use serde_json::Value;

use super::api_server::typed;

/// Returns the project's root folder.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the folder of the manifests.
pub fn folder() -> PathBuf {
    root().join("fleet/kubernetes")
}

/// Returns a folder's kustomization.
fn kustomization(folder: &Path) -> Value {
    let text = fs::read_to_string(folder.join("kustomization.yaml")).unwrap();
    serde_saphyr::from_str(&text).unwrap()
}

/// Returns the documents in the files that a kustomization lists. The kustomization must list all files in its folder.
pub fn documents(folder: &Path) -> Vec<Value> {
    let listed: BTreeSet<_> = kustomization(folder)["resources"]
        .as_array()
        .unwrap()
        .iter()
        .map(|name| name.as_str().unwrap().to_owned())
        .collect();
    let there = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let there: BTreeSet<_> = there.filter(|name| name.ends_with(".yaml") && name != "kustomization.yaml").collect();
    assert_eq!(listed, there);
    let mut documents = Vec::new();
    for name in listed {
        let text = fs::read_to_string(folder.join(name)).unwrap();
        documents.extend(text.split("\n---\n").map(|text| serde_saphyr::from_str::<Value>(text).unwrap()));
    }
    documents
}

/// Renders a folder. Returns the documents with the images from the kustomization, in the order in which `kubectl`
/// applies them.
pub fn rendered(folder: &Path) -> Vec<Value> {
    let kustomization = kustomization(folder);
    let known = ["apiVersion", "kind", "resources", "images"];
    assert!(kustomization.as_object().unwrap().keys().all(|key| known.contains(&key.as_str())), "{kustomization}");
    let mut documents = documents(folder);
    for document in &mut documents {
        for container in
            document.pointer_mut("/spec/template/spec/containers").and_then(Value::as_array_mut).into_iter().flatten()
        {
            let mut images = kustomization["images"].as_array().into_iter().flatten();
            if let Some(image) = images.find(|image| image["name"] == container["image"]) {
                let tagged = [&image["name"], &image["newTag"]].map(|part| part.as_str().unwrap()).join(":");
                container["image"] = tagged.into();
            }
        }
    }
    let first = ["Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding"];
    documents.sort_by_cached_key(|document| {
        let text = |key: &str| document[key].as_str().unwrap().to_owned();
        let name = document["metadata"]["name"].as_str().unwrap().to_owned();
        let at = first.iter().position(|kind| *kind == document["kind"]).unwrap_or(first.len());
        (at, text("apiVersion"), text("kind"), name)
    });
    documents
}

/// Parses a document as the published type of its kind. Returns the kind.
pub fn published(document: &Value) -> &str {
    let kind = document["kind"].as_str().unwrap();
    match kind {
        "Namespace" => drop(typed::<Namespace>(document)),
        "ServiceAccount" => drop(typed::<ServiceAccount>(document)),
        "DeviceClass" => drop(typed::<DeviceClass>(document)),
        "ClusterRole" => drop(typed::<ClusterRole>(document)),
        "ClusterRoleBinding" => drop(typed::<ClusterRoleBinding>(document)),
        "ValidatingAdmissionPolicy" => drop(typed::<ValidatingAdmissionPolicy>(document)),
        "ValidatingAdmissionPolicyBinding" => drop(typed::<ValidatingAdmissionPolicyBinding>(document)),
        "DaemonSet" => drop(typed::<DaemonSet>(document)),
        "ResourceClaimTemplate" => drop(typed::<ResourceClaimTemplate>(document)),
        "Pod" => drop(typed::<Pod>(document)),
        other => panic!("{other}"),
    }
    kind
}
