//! A node with `mediatord` and the driver as processes. The test acts as the kubelet and the API server.
#![allow(dead_code, reason = "each test file uses a part of it")]

pub mod api_server;
pub mod manifests;

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use admin_client::Admin;
use fleet_grpc::dra::{v1, v1beta1};
use fleet_grpc::pluginregistration::registration_client::RegistrationClient;
use fleet_grpc::pluginregistration::{InfoRequest, PluginInfo, RegistrationStatus};
use serde_json::{Value, json};
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};

use api_server::ApiServer;

/// Time limit for each wait.
// TIMEOUT: reached only if a test fails.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the path of a file in cargo's target folder.
pub fn built(name: &str) -> PathBuf {
    let own = std::env::current_exe().expect("this file");
    let path = own.parent().and_then(Path::parent).expect("a cargo folder").join(name);
    assert!(path.exists(), "{} is missing: cargo xtask test --suite fleet builds it", path.display());
    path
}

/// Waits until `look` returns a value.
pub async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let end = Instant::now() + WAIT_TIMEOUT;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < end, "timed out: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A process that is killed on drop.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Configuration of a software card.
pub const CARD: &str = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 256\n";

/// A node with its processes.
pub struct Node {
    pub folder: TempDir,
    pub api: ApiServer,
    pub daemon: Option<Process>,
    pub driver: Option<Process>,
    pub variables: Vec<(String, String)>,
}

impl Node {
    /// Creates a node whose daemon configuration contains `tables`. Of the node's processes, only the API server runs
    /// yet.
    pub async fn new(tables: &str) -> Self {
        // Socket paths must be short.
        let folder = tempfile::Builder::new().prefix("k8s").tempdir_in("/tmp").unwrap();
        let api = ApiServer::default();
        let address = api.serve().await;
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{ "name": "c", "cluster": { "server": format!("http://{address}") } }],
            "users": [{ "name": "u", "user": { "token": "secret" } }],
            "contexts": [{ "name": "x", "context": { "cluster": "c", "user": "u" } }],
        });
        fs::write(folder.path().join("kubeconfig"), config.to_string()).unwrap();
        fs::create_dir_all(folder.path().join("kubelet/plugins_registry")).unwrap();
        let node = Self { folder, api, daemon: None, driver: None, variables: Vec::new() };
        node.configure(tables);
        node
    }

    /// Creates a node with the card `h100` and the fake CUDA driver. The folder `plain` contains the driver's
    /// libraries, and `shim` contains the mediator's library.
    pub async fn with_cuda_card() -> Self {
        let mut node = Self::new("").await;
        for (folder, library) in [("plain", "libcuda_fake.so"), ("shim", "libcuda.so")] {
            fs::create_dir(node.path(folder)).unwrap();
            for name in ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so"] {
                symlink(built(library), node.path(folder).join(name)).unwrap();
            }
        }
        node.variables = [
            ("FAKE_CUDA_FOLDER", node.path("card").display().to_string()),
            ("FAKE_CUDA_MIB", "512".to_owned()),
            ("LD_LIBRARY_PATH", node.path("plain").display().to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        node.configure(&format!(
            "[[card]]\nname = \"h100\"\nkind = \"cuda\"\nvram_mib = 64\nmemory.host_mib = 128\nmemory.quanta.mode = \"off\"\n\
             cuda.driver = \"{}\"\ncuda.chunk_mib = 2\ncuda.host_ready_mib = 4\n",
            node.path("plain/libcuda.so.1").display()
        ));
        node
    }

    /// Adds `h200`, a second CUDA card of the same size.
    pub fn add_second_card(&mut self) {
        let text = self.log("m.toml");
        let (daemon, card) = text.split_once("[[card]]").unwrap();
        let second = card.replace("h100", "h200") + "cuda.device = \"1\"\n";
        fs::write(self.path("m.toml"), format!("{daemon}[[card]]{card}[[card]]{second}")).unwrap();
        self.variables.push(("FAKE_CUDA_CARDS".to_owned(), "2".to_owned()));
    }

    /// Creates a node, and starts all its processes.
    pub async fn running(tables: &str) -> Self {
        let mut node = Self::new(tables).await;
        node.start_daemon();
        node.start_driver(&[]);
        node
    }

    pub fn configure(&self, tables: &str) {
        let folder = self.folder.path().display();
        let text = format!("[daemon]\nadmin_socket = \"{folder}/admin.sock\"\nsocket_dir = \"{folder}\"\n{tables}");
        fs::write(self.path("m.toml"), text).unwrap();
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn admin(&self) -> Admin {
        Admin::new(self.path("admin.sock"))
    }

    pub fn start_daemon(&mut self) {
        let _ = fs::remove_file(self.path("notify"));
        let notify = UnixDatagram::bind(self.path("notify")).unwrap();
        notify.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        let mut command = Command::new(built("mediatord"));
        command.arg("--config").arg(self.path("m.toml")).env("NOTIFY_SOCKET", self.path("notify"));
        command.envs(self.variables.iter().cloned()).stderr(fs::File::create(self.path("daemon.log")).unwrap());
        self.daemon = Some(Process(command.spawn().unwrap()));
        let mut text = [0; 64];
        let length = notify.recv(&mut text).unwrap();
        assert!(text[..length].starts_with(b"READY=1"), "{}", self.log("daemon.log"));
    }

    /// Returns the command that starts the driver.
    pub fn driver(&self, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-mediator-dra"));
        command
            .args(["serve", "--node", "node-a", "--look-every-ms", "100"])
            .arg("--kubelet-root")
            .arg(self.path("kubelet"))
            .arg("--admin-socket")
            .arg(self.path("admin.sock"))
            .arg("--socket-folder")
            .arg(self.path("claims"))
            .arg("--cdi-folder")
            .arg(self.path("cdi"))
            .args(more)
            .env("KUBECONFIG", self.path("kubeconfig"))
            .stdin(Stdio::null());
        command
    }

    pub fn start_driver(&mut self, more: &[&str]) {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.path("driver.log")).unwrap();
        self.driver = Some(Process(self.driver(more).stderr(log).spawn().unwrap()));
    }

    /// Kills the driver immediately.
    pub fn kill_driver(&mut self) {
        self.driver = None;
    }

    pub fn log(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Returns the names of all tenants and virtual machines.
    pub async fn shares(&self) -> Vec<String> {
        let mut names = Vec::new();
        for (path, key) in [("/v1/vms", "vms"), ("/v1/tenants", "tenants")] {
            let list: Value = self.admin().get(path).await.unwrap();
            names.extend(list[key].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()));
        }
        names
    }

    /// Checks that no share of any claim remains.
    pub async fn assert_clean(&self) {
        assert_eq!(self.shares().await, Vec::<String>::new());
        for folder in ["cdi", "claims"] {
            let left: Vec<_> =
                fs::read_dir(self.path(folder)).into_iter().flatten().map(|e| e.unwrap().path()).collect();
            assert!(left.is_empty(), "{left:?}");
        }
        // The file does not exist until the first claim is prepared.
        let kept = self.log("kubelet/plugins/gpu-mediator.internal/claims.json");
        let kept: Value = serde_json::from_str(&kept).unwrap_or_else(|_| json!({ "claims": {} }));
        assert_eq!(kept["claims"], json!({}));
    }

    /// Waits for a slice with this number of devices.
    pub async fn slice(&self, devices: usize) -> k8s_openapi::api::resource::v1::ResourceSlice {
        until("a slice", async || {
            let slice = self
                .api
                .slices()
                .into_iter()
                .find(|slice| slice.metadata.name.as_deref() == Some("node-a-gpu-mediator.internal"));
            slice.filter(|slice| slice.spec.devices.as_deref().unwrap_or_default().len() == devices)
        })
        .await
    }

    /// Returns a kubelet that has registered the driver and supports only the service versions in `knows`.
    pub async fn kubelet(&self, knows: &[&str]) -> Kubelet {
        let socket = self.path("kubelet/plugins_registry/gpu-mediator.internal-reg.sock");
        let mut client = RegistrationClient::new(connect(&socket).await);
        let info = client.get_info(InfoRequest {}).await.unwrap().into_inner();
        let PluginInfo { r#type, name, endpoint, supported_versions } = info;
        assert_eq!((r#type.as_str(), name.as_str()), ("DRAPlugin", "gpu-mediator.internal"));
        let chosen = knows.iter().find(|known| supported_versions.iter().any(|version| version == **known));
        let chosen = chosen.expect("a version that both sides support");
        let status = RegistrationStatus { plugin_registered: true, error: String::new() };
        client.notify_registration_status(status).await.unwrap();
        Kubelet { channel: connect(Path::new(&endpoint)).await, old: *chosen == "v1beta1.DRAPlugin" }
    }
}

/// Connects to a socket as soon as a server listens on it.
pub async fn connect(socket: &Path) -> Channel {
    let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display())).unwrap();
    until("a socket that is served", async || endpoint.connect().await.ok()).await
}

/// A kubelet that has registered the driver.
pub struct Kubelet {
    pub channel: Channel,
    old: bool,
}

/// Returns a claim as sent by the kubelet.
pub fn named(name: &str) -> v1::Claim {
    v1::Claim { namespace: "prod".to_owned(), uid: format!("uid-{name}"), name: name.to_owned() }
}

impl Kubelet {
    pub async fn prepare(&self, claims: &[v1::Claim]) -> Result<v1::NodePrepareResourcesResponse, tonic::Status> {
        let request = v1::NodePrepareResourcesRequest { claims: claims.to_vec() };
        let answer = match self.old {
            true => {
                v1beta1::dra_plugin_client::DraPluginClient::new(self.channel.clone())
                    .node_prepare_resources(request)
                    .await
            }
            false => {
                v1::dra_plugin_client::DraPluginClient::new(self.channel.clone()).node_prepare_resources(request).await
            }
        };
        answer.map(tonic::Response::into_inner)
    }

    pub async fn unprepare(&self, claims: &[v1::Claim]) -> Result<v1::NodeUnprepareResourcesResponse, tonic::Status> {
        let request = v1::NodeUnprepareResourcesRequest { claims: claims.to_vec() };
        let answer = match self.old {
            true => {
                v1beta1::dra_plugin_client::DraPluginClient::new(self.channel.clone())
                    .node_unprepare_resources(request)
                    .await
            }
            false => {
                v1::dra_plugin_client::DraPluginClient::new(self.channel.clone())
                    .node_unprepare_resources(request)
                    .await
            }
        };
        answer.map(tonic::Response::into_inner)
    }

    /// Prepares one claim, which must succeed, and returns its devices.
    pub async fn good(&self, claim: &v1::Claim) -> Vec<v1::Device> {
        let mut answer = self.prepare(std::slice::from_ref(claim)).await.unwrap();
        let one = answer.claims.remove(&claim.uid).unwrap();
        assert_eq!(one.error, "");
        one.devices
    }

    /// Prepares one claim, which must fail, and returns the error.
    pub async fn bad(&self, claim: &v1::Claim) -> String {
        let mut answer = self.prepare(std::slice::from_ref(claim)).await.unwrap();
        let one = answer.claims.remove(&claim.uid).unwrap();
        assert!(!one.error.is_empty() && one.devices.is_empty(), "{one:?}");
        one.error
    }

    /// Unprepares one claim, which must succeed.
    pub async fn back(&self, claim: &v1::Claim) {
        let answer = self.unprepare(std::slice::from_ref(claim)).await.unwrap();
        assert_eq!(answer.claims[&claim.uid].error, "");
    }
}

/// Creates a claim with allocated parts of devices. Each tuple contains the request, device, memory and time of a part.
pub fn allocated(name: &str, parts: &[(&str, &str, &str, &str)], config: Value) -> Value {
    let result = |(number, (request, device, memory, time)): (usize, &(&str, &str, &str, &str))| {
        json!({ "request": request, "driver": "gpu-mediator.internal", "pool": "node-a", "device": device,
            "shareID": format!("share-{number}"), "consumedCapacity": { "memory": memory, "time": time } })
    };
    let results: Vec<Value> = parts.iter().enumerate().map(result).collect();
    let mut devices = json!({ "results": results });
    if !config.is_null() {
        devices["config"] = config;
    }
    json!({
        "metadata": { "name": name, "namespace": "prod", "uid": format!("uid-{name}") },
        "spec": {},
        "status": {
            "allocation": { "devices": devices },
            "reservedFor": [{ "resource": "pods", "name": format!("pod-of-{name}"), "uid": "p" }],
        },
    })
}

/// Creates a set of parameters.
pub fn parameters(source: &str, mut parameters: Value) -> Value {
    parameters["apiVersion"] = "gpu-mediator.internal/v1".into();
    parameters["kind"] = "ShareParameters".into();
    json!({ "source": source, "opaque": { "driver": "gpu-mediator.internal", "parameters": parameters } })
}
