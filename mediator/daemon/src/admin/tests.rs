//! Tests of the admin API over a real socket.

use crate::fixture::{Fixture, Served, copy, eventually, guest, one_card};
use admin_client::AskError;
use api::ErrorCode;
use hyper::Method;
use mediatorctl::client::{Client, ClientError};
use serde_json::json;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

mod events;
mod exposition;
mod memory;
mod page;
mod ram;
mod scheduler;
mod schema;

/// Creates clients of a test daemon's API.
pub(crate) trait HasClient {
    fn client(&self) -> Client;

    /// Returns a client of the read-only socket.
    fn reader(&self) -> Client;
}

impl HasClient for Served {
    fn client(&self) -> Client {
        Client::new(self.fixture.path("admin.sock")).unwrap()
    }

    fn reader(&self) -> Client {
        Client::new(self.fixture.path("read.sock")).unwrap()
    }
}

fn refused(result: Result<impl Sized, ClientError>) -> api::Error {
    match result {
        Err(ClientError::Ask(AskError::Refused(error))) => error,
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
fn admin_errors_name_cause_and_remedy() {
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
    assert_eq!(error.error, "`/v1/vms/a` does not accept PUT");
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
    let error = refused(client.get::<api::LaunchArgs>(&format!("{path}?vmm=xen")));
    assert_eq!((error.code, &*error.error), (ErrorCode::Invalid, "VM `a` is not a Xen domain: it has no `xen_domain`"));
    let error = refused(client.get::<api::LaunchArgs>(&format!("{path}?vmm=bochs")));
    assert!(error.error.contains("unknown variant `bochs`"), "{error:?}");
    let error = refused(client.get::<api::LaunchArgs>(&format!("{path}?memory=much")));
    assert!(error.error.contains("`much` is not a memory size"), "{error:?}");
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
        "# TYPE gpu_mediator_vm_device_seconds_total counter",
        "# TYPE gpu_mediator_vm_transport_bytes gauge",
        "# TYPE gpu_mediator_log_events_suppressed_total counter",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    let mixed = |line: &&str| line.contains("_total{") && line.contains("count=") && line.contains("_ns\"");
    assert_eq!(text.lines().find(|line| mixed(line) && !line.contains("_seconds_total{")), None);
    // Each metric's type is declared only once.
    let described: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    let names: std::collections::BTreeSet<_> = described.iter().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(described.len(), names.len());
}

#[test]
fn read_only_socket_answers_looks_and_refuses_changes() {
    let served = Served::new();
    let (admin, reader) = (served.client(), served.reader());
    let _: api::Vm = admin.post("/v1/vms", &api::AddVm::new("a", "card0", 64)).unwrap();
    for path in ["/v1/vms", "/v1/cards", "/v1/schedulers", "/v1/memory", "/v1/desired", "/v1/schema", "/metrics"] {
        let seen = reader.request(Method::GET, path, Default::default()).unwrap();
        assert!(!seen.is_empty(), "{path}");
    }
    let before = served.fixture.daemon.export();
    let document = api::schema::document();
    let mut refusals = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        let path = path.replace("{name}", "a");
        for method in methods.as_object().unwrap().keys().filter(|method| *method != "get") {
            let Ok(method) = Method::from_bytes(method.to_uppercase().as_bytes()) else { continue };
            let error = refused(reader.request(method.clone(), &path, "{}".into()));
            assert_eq!(error.code, ErrorCode::Forbidden, "{method} {path}");
            refusals += 1;
        }
    }
    assert!(refusals >= 10, "{refusals} requests that make changes");
    assert_eq!(served.fixture.daemon.export(), before);
}

#[test]
fn stalled_admin_client_blocks_no_other_client() {
    let mut served = Served::new();
    let mut hung = UnixStream::connect(served.fixture.path("admin.sock")).unwrap();
    hung.write_all(b"GET /v1/vms HT").unwrap();
    let _: api::VmList = served.client().get("/v1/vms").unwrap();
    served.end().unwrap();
    let mut rest = Vec::new();
    let _ = hung.read_to_end(&mut rest);
}

/// Timeout of each wait, longer than any step of these tests.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn daemon_answers_queries_while_vm_is_locked_and_client_stalls() {
    let served = one_card("");
    let _: api::Vm = served.client().post("/v1/vms", &api::AddVm::new("a", "card0", 16)).unwrap();
    let (mut driver, mut channel) = guest(&served, "a");
    copy(&mut driver, &mut channel);
    driver.wait(&channel);
    let backend = served.fixture.daemon.running_vm("a").unwrap();
    // Each of these clients sends a request without reading the response, and then an incomplete request.
    let mut blocked: Vec<UnixStream> = Vec::new();
    for _ in 0..4 {
        let mut client = UnixStream::connect(served.fixture.path("read.sock")).unwrap();
        client.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/vms HT").unwrap();
        blocked.push(client);
    }
    backend.while_locked(&mut || {
        let (tell, told) = std::sync::mpsc::channel();
        let (admin, reader) = (served.client(), served.reader());
        let fed = served.fed.load(Ordering::Relaxed);
        // Run the clients on another thread, so that a missing response fails the test instead of blocking it.
        std::thread::spawn(move || {
            for client in [admin, reader] {
                for path in LOOKS {
                    let answer = client.request(Method::GET, path, Default::default()).map(|body| body.len());
                    tell.send((path, answer)).unwrap();
                }
            }
        });
        for path in LOOKS.iter().chain(&LOOKS) {
            let (asked, answer) = told.recv_timeout(WAIT_TIMEOUT).unwrap_or_else(|_| panic!("no response for {path}"));
            assert!(asked == *path && answer.as_ref().is_ok_and(|bytes| *bytes > 0), "{asked}: {answer:?}");
        }
        eventually("the watchdog is notified", || served.fed.load(Ordering::Relaxed) > fed + 2);
    });
    drop(blocked);
}

/// Paths of requests that only read.
const LOOKS: [&str; 9] = [
    "/metrics",
    "/v1/vms",
    "/v1/vms/a",
    "/v1/vms/a/memory",
    "/v1/vms/a/time",
    "/v1/cards",
    "/v1/cards/card0",
    "/v1/schedulers",
    "/v1/memory",
];

#[test]
fn daemon_when_all_cards_have_failed_exits_with_error() {
    let fixture = Fixture::real("[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 128\n");
    fixture
        .daemon
        .add(serde_json::from_value(json!({ "name": "a", "card": "card0", "vram_mib": 16 })).unwrap())
        .unwrap();
    let host = fixture.daemon.host_of("card0").unwrap();
    let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _state = host.lock();
        panic!("injected");
    }));
    assert!(panics.is_err());
    let listeners = crate::admin::Listeners {
        admin: std::os::unix::net::UnixListener::bind(fixture.path("admin.sock")).unwrap(),
        read_only: None,
        page: None,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let ended = runtime.block_on(async {
        tokio::time::timeout(WAIT_TIMEOUT, crate::serving::serve(&fixture.daemon, listeners)).await.expect("it ends")
    });
    let error = ended.unwrap_err().to_string();
    assert!(error.contains("all cards have failed"), "{error}");
}
