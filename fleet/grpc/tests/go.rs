//! Tests a server with recorded bytes from a Go client that dials as the kubelet does.
//!
//! `captures/*.hex` were recorded from google.golang.org/grpc 1.33.3, which dialled the UNIX socket
//! `/tmp/cap/plugin.sock`. In `path`, it dialled the path, as the kubelet's plugin watcher does. `escaped` contains the
//! same bytes, except that `:authority` is in the escaped form that newer versions send. In `unix`, it dialled `unix:`
//! followed by the path, as kubelets since 1.34 do for DRA drivers. Each recorded connection calls `GetInfo` twice, and
//! then `NotifyRegistrationStatus`. The later calls use the header table from the first call.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use fleet_grpc::pluginregistration::registration_server::{Registration, RegistrationServer};
use fleet_grpc::pluginregistration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use fleet_grpc::socket::Socket;
use tokio_stream::StreamExt;
use tonic::{Request, Response, Status};

/// Kind of HEADERS frames.
const HEADERS: u8 = 1;
/// Kind of RST_STREAM frames.
const RST_STREAM: u8 = 3;
/// Time limit for each wait. Reached only if a test fails.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Default)]
struct Plugin {
    told: Mutex<Vec<RegistrationStatus>>,
}

#[tonic::async_trait]
impl Registration for Plugin {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        let (name, kind) = ("a plugin with a name".to_owned(), "DRAPlugin".to_owned());
        Ok(Response::new(PluginInfo { r#type: kind, name, endpoint: String::new(), supported_versions: Vec::new() }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.told.lock().unwrap().push(request.into_inner());
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// Returns the bytes of a recording.
fn capture(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures").join(format!("{name}.hex"));
    let text: String = std::fs::read_to_string(path).unwrap().split_whitespace().collect();
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// Sends bytes to a server at `socket`, and reads until the server has completed `streams` streams or closed the
/// connection. Returns the kinds of the received HEADERS and RST_STREAM frames, and the payloads of all received
/// frames.
fn answers(socket: &Path, bytes: &[u8], streams: usize) -> (Vec<u8>, Vec<u8>) {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    stream.write_all(bytes).unwrap();
    let (mut all, mut kinds) = (Vec::new(), Vec::new());
    loop {
        let mut head = [0; 9];
        if stream.read_exact(&mut head).is_err() {
            return (kinds, all);
        }
        let mut payload = vec![0; usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2])];
        stream.read_exact(&mut payload).unwrap();
        all.extend(payload);
        if matches!(head[3], HEADERS | RST_STREAM) {
            kinds.push(head[3]);
        }
        // A successful response has headers and trailers.
        let ended = kinds.iter().filter(|kind| **kind == RST_STREAM).count();
        if (kinds.len() - ended) / 2 + ended == streams {
            return (kinds, all);
        }
    }
}

/// Runs a server on a socket until `client` returns. Uses [`fleet_grpc::authority::Localhost`] if `rewrites` is true.
fn served<T: Send + 'static>(rewrites: bool, client: impl FnOnce(&Path) -> T + Send + 'static) -> T {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plugin.sock");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let server = tonic::transport::Server::builder().add_service(RegistrationServer::new(Plugin::default()));
        let (socket, serving) = if rewrites {
            let (socket, incoming) = Socket::bind(&path).unwrap();
            (Some(socket), tokio::spawn(server.serve_with_incoming(incoming)))
        } else {
            let listener = tokio::net::UnixListener::bind(&path).unwrap();
            let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener).map(|one| one);
            (None, tokio::spawn(server.serve_with_incoming(incoming)))
        };
        let done = tokio::task::spawn_blocking(move || client(&path)).await.unwrap();
        serving.abort();
        drop(socket);
        done
    })
}

#[test]
fn go_client_is_answered_with_any_authority() {
    for name in ["path", "escaped", "unix"] {
        let bytes = capture(name);
        let (kinds, answers) = served(true, move |socket| answers(socket, &bytes, 3));
        assert_eq!(kinds, [HEADERS; 6], "{name}");
        let text = String::from_utf8_lossy(&answers).into_owned();
        assert_eq!(text.matches("a plugin with a name").count(), 2, "{name}: {text}");
    }
}

#[test]
fn without_the_rewriting_a_path_is_refused() {
    for (name, kind, count) in [("path", RST_STREAM, 3), ("escaped", RST_STREAM, 3), ("unix", HEADERS, 6)] {
        let bytes = capture(name);
        let (kinds, _) = served(false, move |socket| answers(socket, &bytes, 3));
        assert_eq!(kinds, vec![kind; count], "{name}");
    }
}

#[test]
fn junk_ends_its_connection_and_no_other() {
    let bytes = capture("path");
    served(true, move |socket| {
        let mut open = UnixStream::connect(socket).unwrap();
        open.write_all(&bytes[..40]).unwrap();
        for junk in [b"GET / HTTP/1.1\r\n\r\n".as_slice(), &[0xff; 4096], &[&bytes[..24], &[0xff; 64]].concat()] {
            let mut stream = UnixStream::connect(socket).unwrap();
            stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
            let _ = stream.write_all(junk);
            // The server's settings may arrive before the connection is closed.
            let _ = stream.read_to_end(&mut Vec::new());
        }
        let (kinds, _) = answers(socket, &bytes, 3);
        assert_eq!(kinds, [HEADERS; 6]);
    });
}

#[test]
fn socket_replaces_only_unserved_socket() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _entered = runtime.enter();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let (socket, incoming) = Socket::bind(&path).unwrap();
    let error = Socket::bind(&path).err().unwrap().to_string();
    assert!(error.contains("another process already serves"), "{error}");
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    drop((socket, incoming));
    assert!(!path.exists());
    std::fs::write(&path, "a file").unwrap();
    let error = Socket::bind(&path).err().unwrap().to_string();
    assert!(error.contains("is not a socket"), "{error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "a file");
}
