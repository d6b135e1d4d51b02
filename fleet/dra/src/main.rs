//! `gpu-mediator-dra`: the Kubernetes driver of one node.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use admin_client::Admin;
use anyhow::{Context, Result, ensure};
use axum::Router;
use axum::http::header;
use axum::routing::get;
use clap::{Args, Parser, Subcommand};
use fleet_dra::device::Offer;
use fleet_dra::driver::{Driver, Settings};
use fleet_dra::metrics::Metrics;
use fleet_dra::plugin::{self, Plugin, Registrar};
use fleet_dra::slices::{self, Publisher};
use fleet_dra::store::Store;
use fleet_grpc::dra::{v1, v1beta1};
use fleet_grpc::pluginregistration::registration_server::RegistrationServer;
use fleet_grpc::{health, socket};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tonic::transport::Server;
use tracing_subscriber::EnvFilter;

/// Hands out the cards of a node's mediatord to pods.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serves the kubelet until it is stopped
    Serve(Box<Serve>),
    /// Prints the schema of a claim's parameters
    Schema,
}

#[derive(Debug, Args)]
struct Serve {
    /// Name of the node
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node: String,
    /// Root folder of the kubelet
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    kubelet_root: PathBuf,
    /// mediatord's admin socket
    #[arg(long, value_name = "PATH", env = "MEDIATORCTL_SOCKET", default_value = "/run/gpu-mediator/admin.sock")]
    admin_socket: PathBuf,
    /// Folder for the shares' sockets; mediatord must see it at the same path
    #[arg(long, value_name = "DIR", default_value = "/run/gpu-mediator/claims")]
    socket_folder: PathBuf,
    /// Folder for CDI files
    #[arg(long, value_name = "DIR", default_value = cdi_spec::FOLDER)]
    cdi_folder: PathBuf,
    /// Folder on the host with the library for CUDA programs
    #[arg(long, value_name = "DIR", default_value = "/usr/lib/gpu-mediator/cuda")]
    cuda_library: PathBuf,
    /// NVIDIA's libcuda.so.1 on the host, for containers that do not get it in any other way
    #[arg(long, value_name = "PATH")]
    driver_library: Option<PathBuf>,
    /// A CDI device that a container gets in addition to a tenant's, such as nvidia.com/gpu=all; may be given several
    /// times
    #[arg(long, value_name = "DEVICE")]
    with_cdi_device: Vec<String>,
    /// Address for metrics and the liveness check
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<SocketAddr>,
    /// Interval at which the cards are polled, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    look_every_ms: u64,
}

/// Maximum length of a node's name in bytes. The name is part of the slice's name.
const MAX_NODE: usize = 200;
/// Interval between two checks for shares that the daemon has lost.
const MEND: Duration = Duration::from_secs(5);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Serve(serve) => {
            let filter = EnvFilter::try_from_env("GPU_MEDIATOR_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
            tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
            serve.run().await
        }
        Command::Schema => {
            print!("{}", fleet_dra::parameters::schema()?);
            Ok(())
        }
    }
}

impl Serve {
    fn settings(&self) -> Settings {
        Settings {
            node: self.node.clone(),
            sockets: self.socket_folder.clone(),
            cdi: self.cdi_folder.clone(),
            admin: self.admin_socket.clone(),
            library: self.cuda_library.clone(),
            driver_library: self.driver_library.clone(),
            beside: self.with_cdi_device.clone(),
        }
    }

    async fn run(self) -> Result<()> {
        ensure!(!self.node.is_empty() && self.node.len() <= MAX_NODE, "--node: expected 1 to {MAX_NODE} bytes");
        // Register the signal handler before any slow step.
        let mut end = signal(SignalKind::terminate()).context("no signals")?;
        let kube = kube::Client::try_default()
            .await
            .context("no API server is configured: run this in a pod, or set KUBECONFIG")?;
        let folder = plugin::folder(&self.kubelet_root);
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let store = Store::open(&folder.join("claims.json"))?;
        let metrics = Arc::new(Metrics::default());
        let (sender, offers) = watch::channel(Vec::<Offer>::new());

        let admin = Admin::new(self.admin_socket.clone());
        let follow = slices::follow(admin, Duration::from_millis(self.look_every_ms), sender, Arc::clone(&metrics));
        tokio::spawn(follow);
        tokio::spawn(Publisher::new(kube.clone(), &self.node, Arc::clone(&metrics)).run(offers.clone()));
        let driver = Arc::new(Driver::new(self.settings(), kube, offers.clone(), store, Arc::clone(&metrics)));
        tokio::spawn(mend(Arc::clone(&driver), offers.clone()));
        if let Some(address) = self.metrics {
            let listener = TcpListener::bind(address).await.with_context(|| format!("--metrics {address}"))?;
            tokio::spawn(axum::serve(listener, pages(Arc::clone(&metrics))).into_future());
        }

        let plugin = Plugin::new(driver, offers, &self.node);
        let endpoint = folder.join("dra.sock");
        let (socket, incoming) = socket::Socket::bind(&endpoint)?;
        let serving = Server::builder()
            .max_concurrent_streams(socket::MAX_STREAMS)
            .add_service(v1::dra_plugin_server::DraPluginServer::new(plugin.clone()))
            .add_service(v1beta1::dra_plugin_server::DraPluginServer::new(plugin.clone()))
            .add_service(health::v1alpha1::dra_resource_health_server::DraResourceHealthServer::new(plugin.clone()))
            .add_service(health::v1beta1::dra_resource_health_server::DraResourceHealthServer::new(plugin.clone()))
            .add_service(health::v1::dra_resource_health_server::DraResourceHealthServer::new(plugin))
            .serve_with_incoming(incoming);
        // The kubelet connects as soon as it detects the registration socket, so create the driver's own socket first.
        let registration = plugin::registration(&self.kubelet_root);
        let (registrar, registering) = socket::Socket::bind(&registration)
            .with_context(|| format!("is --kubelet-root {} right?", self.kubelet_root.display()))?;
        let registering = Server::builder()
            .max_concurrent_streams(socket::MAX_STREAMS)
            .add_service(RegistrationServer::new(Registrar { endpoint, metrics }))
            .serve_with_incoming(registering);
        tracing::info!(node = self.node, socket = %registration.display(), "ready");
        tokio::select! {
            served = serving => served.context("serving the kubelet")?,
            served = registering => served.context("serving the kubelet's registration")?,
            _ = end.recv() => tracing::info!("ends"),
        }
        // Close the registration socket first, because the kubelet uses it to find the driver's own socket.
        drop(registrar);
        drop(socket);
        Ok(())
    }
}

/// Recreates shares that a restarted daemon has lost.
async fn mend(driver: Arc<Driver>, mut offers: watch::Receiver<Vec<Offer>>) {
    loop {
        driver.mend().await;
        // The wait ends early if the cards change, for example after a restart of the daemon.
        let _ = tokio::time::timeout(MEND, offers.changed()).await;
    }
}

fn pages(metrics: Arc<Metrics>) -> Router {
    let text = move || {
        let page = ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], metrics.text());
        std::future::ready(page)
    };
    Router::new().route("/metrics", get(text)).route("/healthz", get(async || "ok\n"))
}
