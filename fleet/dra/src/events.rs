//! Sends Kubernetes events about claims.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1 as events;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};

use crate::DRIVER;
use crate::claim::Named;

/// Maximum length of an event's note in bytes, which is a limit of the API server.
const MAX_NOTE: usize = 1024;
/// Maximum number of claims whose last failure is stored.
const MAX_FAILURES: usize = 1024;
/// Time limit for the API server to accept an event.
const API_TIMEOUT: Duration = Duration::from_secs(10);

/// An event about a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    claim: Named,
    pods: Option<String>,
    reason: &'static str,
    action: &'static str,
    good: bool,
    note: String,
}

impl Event {
    /// Creates the event for a prepared claim.
    #[must_use]
    pub fn prepared(claim: &Named, pods: Option<String>, shares: &str) -> Self {
        let of = pods.as_deref().map(|pods| format!(" of pod {pods}")).unwrap_or_default();
        let note = format!("{shares} created for claim {}{of} in namespace {}", claim.name, claim.namespace);
        Self { claim: claim.clone(), pods, reason: "SharePrepared", action: "Prepare", good: true, note }
    }

    /// Creates the event for a claim that could not be prepared.
    #[must_use]
    pub fn failed(claim: &Named, what: &str) -> Self {
        let note = what.to_owned();
        Self { claim: claim.clone(), pods: None, reason: "ShareRefused", action: "Prepare", good: false, note }
    }

    /// Creates the event for an unprepared claim.
    #[must_use]
    pub fn removed(claim: &Named) -> Self {
        let note = format!("the resources of claim {} in namespace {} are free", claim.name, claim.namespace);
        Self { claim: claim.clone(), pods: None, reason: "ShareRemoved", action: "Unprepare", good: true, note }
    }

    fn object(&self, node: &str) -> events::Event {
        let Named { namespace, name, uid } = &self.claim;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let nanos = i64::try_from(now.as_nanos()).unwrap_or_default();
        let kept: String = name.chars().take(200).collect();
        let of = |kind: &str, version: &str, name: &str, uid: Option<&str>| ObjectReference {
            api_version: Some(version.to_owned()),
            kind: Some(kind.to_owned()),
            name: Some(name.to_owned()),
            namespace: Some(namespace.clone()),
            uid: uid.map(str::to_owned),
            ..ObjectReference::default()
        };
        let first = self.pods.as_deref().and_then(|pods| pods.split(',').next());
        events::Event {
            metadata: ObjectMeta {
                name: Some(format!("{kept}.{nanos:x}")),
                namespace: Some(namespace.clone()),
                ..ObjectMeta::default()
            },
            event_time: Timestamp::from_nanosecond(nanos.into()).ok().map(MicroTime),
            reporting_controller: Some(DRIVER.to_owned()),
            reporting_instance: Some(node.chars().take(128).collect()),
            action: Some(self.action.to_owned()),
            reason: Some(self.reason.to_owned()),
            type_: Some(if self.good { "Normal" } else { "Warning" }.to_owned()),
            note: Some(cut(&self.note)),
            regarding: Some(of("ResourceClaim", "resource.k8s.io/v1", name, Some(uid))),
            related: first.map(|pod| of("Pod", "v1", pod, None)),
            ..events::Event::default()
        }
    }
}

/// Truncates a note to the permitted length.
fn cut(note: &str) -> String {
    let end = (0..=MAX_NOTE.min(note.len())).rev().find(|at| note.is_char_boundary(*at)).unwrap_or_default();
    note[..end].to_owned()
}

/// Sends events to the API server without delaying the caller.
pub struct Events {
    kube: Client,
    node: String,
    /// The last reported failure of each claim, so that the kubelet's retries do not repeat the event.
    failures: Mutex<BTreeMap<String, String>>,
}

impl Events {
    /// Creates a sender for events of a node.
    #[must_use]
    pub fn new(kube: Client, node: &str) -> Self {
        Self { kube, node: node.to_owned(), failures: Mutex::default() }
    }

    /// Sends an event, unless it reports the same failure as the claim's last event.
    pub fn tell(&self, event: Event) {
        if !self.is_news(&event) {
            return;
        }
        let claims: Api<events::Event> = Api::namespaced(self.kube.clone(), &event.claim.namespace);
        let object = event.object(&self.node);
        tokio::spawn(async move {
            match tokio::time::timeout(API_TIMEOUT, claims.create(&PostParams::default(), &object)).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => tracing::debug!(%error, "the API server rejected an event"),
                Err(_) => tracing::debug!("the API server did not accept an event in time"),
            }
        });
    }

    fn is_news(&self, event: &Event) -> bool {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        if event.good {
            failures.remove(&event.claim.uid);
            return true;
        }
        if failures.get(&event.claim.uid) == Some(&event.note) {
            return false;
        }
        if failures.len() >= MAX_FAILURES {
            failures.clear();
        }
        failures.insert(event.claim.uid.clone(), event.note.clone());
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_names_claim_pod_and_share() {
        let claim = Named { namespace: "prod".to_owned(), name: "web".to_owned(), uid: "u".to_owned() };
        let event = Event::prepared(&claim, Some("web-0,web-1".to_owned()), "k8s-u-0").object("node");
        assert_eq!(event.note.as_deref(), Some("k8s-u-0 created for claim web of pod web-0,web-1 in namespace prod"));
        assert_eq!(event.related.unwrap().name.as_deref(), Some("web-0"));
        assert_eq!(event.regarding.unwrap().uid.as_deref(), Some("u"));
        assert!(event.event_time.is_some() && event.metadata.name.unwrap().starts_with("web."));
        let long = Event::failed(&claim, &"ä".repeat(1000)).object("node").note.unwrap();
        assert_eq!(long.len(), MAX_NOTE);
        assert_eq!(cut(&format!("a{}", "ä".repeat(1000))).len(), MAX_NOTE - 1);
    }
}
