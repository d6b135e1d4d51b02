//! An API server for one driver. It stores objects, validates them against the published types, and records requests.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

/// A verb, an API group, and a resource, as in an RBAC role.
pub type Call = (&'static str, &'static str, &'static str);

#[derive(Default)]
struct Objects {
    version: u64,
    slices: BTreeMap<String, Value>,
    claims: BTreeMap<(String, String), Value>,
    events: Vec<Event>,
    calls: BTreeSet<Call>,
    watches: Vec<mpsc::Sender<String>>,
    /// Number of slice writes so far.
    writes: usize,
    /// Device fields that this cluster drops, as if their features were disabled.
    forgets: Vec<&'static str>,
    /// Set if the server responds to every request with an error.
    broken: bool,
}

/// A handle to the server. All clones share the server's objects.
#[derive(Clone, Default)]
pub struct ApiServer(Arc<Mutex<Objects>>);

/// A Kubernetes type, as defined by the newest version in the `k8s-openapi` crate and by version 1.34, the oldest
/// supported version.
pub trait Published: DeserializeOwned + Serialize {
    type Oldest: DeserializeOwned + Serialize;
}

macro_rules! published {
    ($($group:ident: $($kind:ident)+;)+) => { $($(
        impl Published for k8s_openapi::api::$group::v1::$kind {
            type Oldest = k8s_openapi_oldest::api::$group::v1::$kind;
        }
    )+)+ };
}

published! {
    admissionregistration: ValidatingAdmissionPolicy ValidatingAdmissionPolicyBinding;
    apps: DaemonSet;
    core: Namespace Node Pod ServiceAccount;
    events: Event;
    rbac: ClusterRole ClusterRoleBinding;
    resource: DeviceClass ResourceClaim ResourceClaimTemplate ResourceSlice;
}

/// Parses an object as the published type of both the oldest and the newest Kubernetes version. Panics if the object
/// has unknown fields.
pub fn typed<T: Published>(value: &Value) -> T {
    drop(exactly::<T::Oldest>(value));
    exactly(value)
}

fn exactly<T: DeserializeOwned + Serialize>(value: &Value) -> T {
    let object: T = serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{error}: {value:#}"));
    assert_eq!(serde_json::to_value(&object).unwrap(), *value, "fields that the type does not have");
    object
}

impl ApiServer {
    fn objects(&self) -> std::sync::MutexGuard<'_, Objects> {
        self.0.lock().unwrap()
    }

    /// Starts serving on the loopback interface, and returns the address.
    pub async fn serve(&self) -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let slices = "/apis/resource.k8s.io/v1/resourceslices";
        let router = Router::new()
            .route(slices, get(list).post(create))
            .route(&format!("{slices}/{{name}}"), axum::routing::put(replace).delete(delete))
            .route("/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}", get(claim))
            .route("/apis/events.k8s.io/v1/namespaces/{namespace}/events", axum::routing::post(event))
            .route("/api/v1/nodes/{name}", get(node))
            .fallback(unknown)
            .with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        address
    }

    /// Adds a claim.
    pub fn put_claim(&self, claim: Value) {
        let claim = with_kind(claim, "resource.k8s.io/v1", "ResourceClaim");
        let typed: ResourceClaim = typed(&claim);
        let key = (typed.metadata.namespace.unwrap(), typed.metadata.name.unwrap());
        self.objects().claims.insert(key, claim);
    }

    pub fn remove_claim(&self, namespace: &str, name: &str) {
        self.objects().claims.remove(&(namespace.to_owned(), name.to_owned()));
    }

    /// Adds a slice, as another client would.
    pub fn put_slice(&self, slice: Value) {
        let slice = with_kind(slice, "resource.k8s.io/v1", "ResourceSlice");
        drop(typed::<ResourceSlice>(&slice));
        self.objects().store(slice, "ADDED");
    }

    /// Returns the slices as the published type.
    pub fn slices(&self) -> Vec<ResourceSlice> {
        self.objects().slices.values().map(typed).collect()
    }

    /// Removes all slices, as a starting kubelet does.
    pub fn wipe(&self) {
        let mut objects = self.objects();
        objects.version += 1;
        for (_, slice) in std::mem::take(&mut objects.slices) {
            objects.tell("DELETED", &slice);
        }
    }

    pub fn events(&self) -> Vec<Event> {
        self.objects().events.clone()
    }

    pub fn calls(&self) -> BTreeSet<Call> {
        self.objects().calls.clone()
    }

    pub fn writes(&self) -> usize {
        self.objects().writes
    }

    /// Makes the cluster drop these device fields.
    pub fn forget(&self, fields: &[&'static str]) {
        self.objects().forgets = fields.to_vec();
    }

    /// Makes all requests fail if `broken` is true. Otherwise, makes them succeed again.
    pub fn break_down(&self, broken: bool) {
        self.objects().broken = broken;
    }

    #[expect(clippy::result_large_err, reason = "the response of a test server")]
    fn called(&self, call: Call) -> Result<std::sync::MutexGuard<'_, Objects>, Response> {
        let mut objects = self.objects();
        if objects.broken {
            return Err(failure(StatusCode::INTERNAL_SERVER_ERROR, "InternalError"));
        }
        objects.calls.insert(call);
        Ok(objects)
    }
}

impl Objects {
    /// Stores a slice with a new version, notifies the watchers, and returns the slice.
    fn store(&mut self, mut slice: Value, what: &str) -> Value {
        self.version += 1;
        slice["metadata"]["resourceVersion"] = self.version.to_string().into();
        for device in slice["spec"]["devices"].as_array_mut().into_iter().flatten() {
            let device = device.as_object_mut().unwrap();
            self.forgets.iter().for_each(|field| drop(device.remove(*field)));
            // The real API server also sets this time.
            for taint in device.get_mut("taints").and_then(Value::as_array_mut).into_iter().flatten() {
                taint["timeAdded"] = "2026-11-24T06:00:00Z".into();
            }
        }
        let name = slice["metadata"]["name"].as_str().unwrap().to_owned();
        self.slices.insert(name, slice.clone());
        self.tell(what, &slice);
        slice
    }

    fn tell(&mut self, what: &str, slice: &Value) {
        let line = json!({ "type": what, "object": slice }).to_string() + "\n";
        self.watches.retain(|watch| watch.try_send(line.clone()).is_ok());
    }
}

fn with_kind(mut object: Value, version: &str, kind: &str) -> Value {
    (object["apiVersion"], object["kind"]) = (version.into(), kind.into());
    object
}

fn failure(status: StatusCode, reason: &str) -> Response {
    let code = status.as_u16();
    let body = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": reason, "code": code,
        "message": reason });
    (status, axum::Json(body)).into_response()
}

fn good(object: &Value) -> Response {
    axum::Json(object).into_response()
}

/// Checks that a slice obeys those rules of the API server that its type does not express.
fn valid(slice: &ResourceSlice) {
    let label = |text: &str| {
        let byte = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        (1..=63).contains(&text.len()) && text.bytes().all(byte) && !text.starts_with('-') && !text.ends_with('-')
    };
    let identifier =
        |text: &str| text.len() <= 32 && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let spec = &slice.spec;
    assert!(spec.pool.resource_slice_count == 1 && spec.pool.generation > 0);
    let devices = spec.devices.as_deref().unwrap_or_default();
    assert!(devices.len() <= 128);
    let names: BTreeSet<_> = devices.iter().map(|device| &device.name).collect();
    assert_eq!(names.len(), devices.len());
    for device in devices {
        assert!(label(&device.name), "{}", device.name);
        let (attributes, capacity) = (device.attributes.as_ref().unwrap(), device.capacity.as_ref().unwrap());
        assert!(attributes.len() + capacity.len() <= 32);
        assert!(attributes.keys().chain(capacity.keys()).all(|name| identifier(name)));
        for attribute in attributes.values() {
            let set = [
                attribute.bool.is_some(),
                attribute.int.is_some(),
                attribute.string.is_some(),
                attribute.version.is_some(),
            ];
            assert_eq!(set.iter().filter(|set| **set).count(), 1, "{attribute:?}");
            assert!(attribute.string.as_ref().is_none_or(|text| text.len() <= 64));
        }
        for taint in device.taints.iter().flatten() {
            assert!(["NoSchedule", "NoExecute", "None"].contains(&taint.effect.as_str()));
            assert!(taint.value.as_ref().is_none_or(|value| label(value)));
        }
    }
}

/// Fails the test on any other request.
async fn unknown(request: axum::extract::Request) -> Response {
    panic!("{} {}", request.method(), request.uri());
}

async fn list(State(server): State<ApiServer>, Query(query): Query<BTreeMap<String, String>>) -> Response {
    let watches = query.get("watch").is_some_and(|watch| watch == "true" || watch == "1");
    let verb = if watches { "watch" } else { "list" };
    assert_eq!(
        query["fieldSelector"], "spec.nodeName=node-a,spec.driver=gpu-mediator.internal",
        "no one else's slices"
    );
    let mut objects = match server.called((verb, "resource.k8s.io", "resourceslices")) {
        Ok(objects) => objects,
        Err(failure) => return failure,
    };
    if watches {
        let since: u64 = query["resourceVersion"].parse().unwrap();
        let (sender, receiver) = mpsc::channel::<String>(64);
        if since < objects.version {
            // Report that objects have changed since that version. One event is sufficient, because the watcher then
            // reloads all objects.
            let news = json!({ "type": "BOOKMARK", "object": { "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
                "metadata": { "resourceVersion": objects.version.to_string(), "annotations": {} } } });
            sender.try_send(news.to_string() + "\n").unwrap();
        }
        objects.watches.push(sender);
        return Body::from_stream(ReceiverStream::new(receiver).map(Ok::<_, Infallible>)).into_response();
    }
    let items: Vec<&Value> = objects.slices.values().collect();
    good(&json!({ "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSliceList",
        "metadata": { "resourceVersion": objects.version.to_string() }, "items": items }))
}

async fn create(State(server): State<ApiServer>, axum::Json(body): axum::Json<Value>) -> Response {
    let slice: ResourceSlice = typed(&body);
    valid(&slice);
    let mut objects = match server.called(("create", "resource.k8s.io", "resourceslices")) {
        Ok(objects) => objects,
        Err(failure) => return failure,
    };
    if objects.slices.contains_key(slice.metadata.name.as_deref().unwrap()) {
        return failure(StatusCode::CONFLICT, "AlreadyExists");
    }
    objects.writes += 1;
    good(&objects.store(body, "ADDED"))
}

async fn replace(
    State(server): State<ApiServer>,
    Path(name): Path<String>,
    axum::Json(body): axum::Json<Value>,
) -> Response {
    let slice: ResourceSlice = typed(&body);
    valid(&slice);
    let mut objects = match server.called(("update", "resource.k8s.io", "resourceslices")) {
        Ok(objects) => objects,
        Err(failure) => return failure,
    };
    let Some(there) = objects.slices.get(&name) else { return failure(StatusCode::NOT_FOUND, "NotFound") };
    if there["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"] {
        return failure(StatusCode::CONFLICT, "Conflict");
    }
    let (before, after) = (&there["spec"]["pool"]["generation"], &body["spec"]["pool"]["generation"]);
    assert!(before.as_i64() < after.as_i64(), "each change has its own generation");
    objects.writes += 1;
    good(&objects.store(body, "MODIFIED"))
}

async fn delete(State(server): State<ApiServer>, Path(name): Path<String>) -> Response {
    let mut objects = match server.called(("delete", "resource.k8s.io", "resourceslices")) {
        Ok(objects) => objects,
        Err(failure) => return failure,
    };
    match objects.slices.remove(&name) {
        Some(slice) => {
            objects.version += 1;
            objects.tell("DELETED", &slice);
            good(&slice)
        }
        None => failure(StatusCode::NOT_FOUND, "NotFound"),
    }
}

async fn claim(State(server): State<ApiServer>, Path(key): Path<(String, String)>) -> Response {
    let objects = match server.called(("get", "resource.k8s.io", "resourceclaims")) {
        Ok(objects) => objects,
        Err(failure) => return failure,
    };
    objects.claims.get(&key).map_or_else(|| failure(StatusCode::NOT_FOUND, "NotFound"), good)
}

async fn event(
    State(server): State<ApiServer>,
    Path(namespace): Path<String>,
    axum::Json(body): axum::Json<Value>,
) -> Response {
    let event: Event = typed(&body);
    assert_eq!(event.metadata.namespace.as_deref(), Some(namespace.as_str()));
    let required = [&event.action, &event.reason, &event.type_, &event.reporting_controller, &event.reporting_instance];
    assert!(
        required.iter().all(|field| field.as_ref().is_some_and(|text| !text.is_empty())) && event.event_time.is_some()
    );
    let mut objects = match server.called(("create", "events.k8s.io", "events")) {
        Ok(objects) => objects,
        Err(failure) => return failure,
    };
    objects.events.push(event);
    good(&body)
}

async fn node(State(server): State<ApiServer>, Path(name): Path<String>) -> Response {
    match server.called(("get", "", "nodes")) {
        Ok(_) => {
            let node =
                json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name, "uid": "uid-of-node" } });
            drop(typed::<Node>(&node));
            good(&node)
        }
        Err(failure) => failure,
    }
}
