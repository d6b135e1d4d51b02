//! The admin API over a real socket.

use super::*;
use crate::ctl::client::{Client, ClientError};
use crate::daemon::tests::Fixture;
use api::ErrorCode;
use hyper::Method;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

mod exposition;
mod memory;
pub(crate) mod scheduler;
mod schema;

/// A daemon whose admin API is served.
pub(crate) struct Served {
    pub fixture: Fixture,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl Served {
    pub fn new() -> Self {
        Self::over(Fixture::new())
    }

    pub fn over(fixture: Fixture) -> Self {
        let listener = UnixListener::bind(fixture.path("admin.sock")).unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let daemon = Arc::clone(&fixture.daemon);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(serve(daemon, listener, async {
                let _ = stopped.await;
            }))
        });
        Self { fixture, stop: Some(stop), thread: Some(thread) }
    }

    pub fn client(&self) -> Client {
        Client::new(self.fixture.path("admin.sock")).unwrap()
    }

    fn end(&mut self) -> std::io::Result<()> {
        drop(self.stop.take());
        self.thread.take().map_or(Ok(()), |thread| thread.join().unwrap())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.end().unwrap();
    }
}

fn refused(result: Result<impl Sized, ClientError>) -> api::Error {
    match result {
        Err(ClientError::Refused(error)) => error,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("accepted"),
    }
}

#[test]
fn vm_is_added_shown_listed_and_removed() {
    let served = Served::new();
    let client = served.client();
    let added: api::Vm = client.post("/v1/vms", &api::AddVm::new("a", "card0", 64)).unwrap();
    let shown: api::Vm = client.get("/v1/vms/a").unwrap();
    assert_eq!(added, shown);
    assert_eq!((shown.denied_total, shown.counters["doorbells"]), (6, 7));
    let list: api::VmList = client.get("/v1/vms").unwrap();
    assert_eq!(list.vms, [shown]);
    let card: api::Card = client.get("/v1/cards/card0").unwrap();
    assert_eq!(card.vms, ["a"]);
    client.delete("/v1/vms/a").unwrap();
    assert_eq!(refused(client.get::<api::Vm>("/v1/vms/a")).code, ErrorCode::NotFound);
    let list: api::CardList = client.get("/v1/cards").unwrap();
    assert_eq!(list.cards.iter().map(|card| card.vms.len()).collect::<Vec<_>>(), [0, 0]);
}

#[test]
fn errors_say_what_is_wrong_and_what_to_do() {
    let served = Served::new();
    let client = served.client();
    let error = refused(client.post::<api::Vm>("/v1/vms", &api::AddVm::new("a", "card9", 64)));
    assert_eq!(error.error, "VM `a`: card: there is no card `card9`, expected `card0` or `card1`");
    assert!(!error.what_to_do.is_empty());
    let body = serde_json::json!({ "name": "a", "card": "card0", "vram": 64 });
    let error = refused(client.post::<api::Vm>("/v1/vms", &body));
    assert_eq!(error.code, ErrorCode::Invalid);
    assert!(error.error.contains("unknown field `vram`"), "{error:?}");
    let error = refused(client.request(Method::POST, "/v1/vms", "{".into()));
    assert_eq!(error.code, ErrorCode::Invalid);
    let error = refused(client.get::<api::Vm>("/v2/vms"));
    assert_eq!((error.code, &*error.error), (ErrorCode::NotFound, "there is no `/v2/vms`"));
    let error = refused(client.request(Method::PUT, "/v1/vms/a", Default::default()));
    assert_eq!(error.error, "`/v1/vms/a` does not take PUT");
}

#[test]
fn launch_args_name_the_socket_and_bad_queries_are_refused() {
    let served = Served::new();
    let client = served.client();
    let path = "/v1/vms/a/launch-args";
    assert_eq!(refused(client.get::<api::LaunchArgs>(path)).code, ErrorCode::NotFound);
    let _: api::Vm = client.post("/v1/vms", &api::AddVm::new("a", "card0", 64)).unwrap();
    let args: api::LaunchArgs = client.get(path).unwrap();
    let socket = served.fixture.path("a.sock").display().to_string();
    assert!(args.command.contains(&socket) && args.command.contains("share=on"), "{}", args.command);
    let args: api::LaunchArgs = client.get(&format!("{path}?vmm=cloud-hypervisor&memory=4G")).unwrap();
    assert_eq!(args.args, ["--memory", "size=4G,shared=on", "--user-device", &format!("socket={socket}")]);
    let error = refused(client.get::<api::LaunchArgs>(&format!("{path}?vmm=bochs")));
    assert!(error.error.contains("unknown variant `bochs`"), "{error:?}");
    let error = refused(client.get::<api::LaunchArgs>(&format!("{path}?memory=much")));
    assert!(error.error.contains("`much` is no size"), "{error:?}");
}

#[test]
fn metrics_are_in_prometheus_form() {
    let served = Served::new();
    let client = served.client();
    let _: api::Vm = client.post("/v1/vms", &api::AddVm::new("a", "card0", 64)).unwrap();
    let text = client.request(Method::GET, "/metrics", Default::default()).unwrap();
    let text = String::from_utf8(text.to_vec()).unwrap();
    for line in [
        "gpu_mediator_card_vram_bytes{card=\"card0\",use=\"assigned\"} 67108864",
        "gpu_mediator_vm_state{vm=\"a\",card=\"card0\",state=\"waiting\"} 1",
        "gpu_mediator_vm_state{vm=\"a\",card=\"card0\",state=\"connected\"} 0",
        "gpu_mediator_vm_channels{vm=\"a\",card=\"card0\"} 3",
        "gpu_mediator_vm_denied_total{vm=\"a\",card=\"card0\",reason=\"unknown register\"} 6",
        "gpu_mediator_vm_device_total{vm=\"a\",card=\"card0\",count=\"doorbells\"} 7",
        "# TYPE gpu_mediator_log_events_suppressed_total counter",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    // Each metric is described once, before its samples.
    let described: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    let names: std::collections::BTreeSet<_> = described.iter().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(described.len(), names.len());
}

#[test]
fn client_that_stops_in_the_middle_of_a_request_holds_up_nobody() {
    let mut served = Served::new();
    let mut hung = UnixStream::connect(served.fixture.path("admin.sock")).unwrap();
    hung.write_all(b"GET /v1/vms HT").unwrap();
    let _: api::VmList = served.client().get("/v1/vms").unwrap();
    served.end().unwrap();
    let mut rest = Vec::new();
    let _ = hung.read_to_end(&mut rest);
}
