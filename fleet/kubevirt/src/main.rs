//! `gpu-mediator-kubevirt`: a sidecar of KubeVirt's virt-launcher.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;
use fleet_grpc::hooks::info::info_server::InfoServer;
use fleet_grpc::hooks::{v1alpha2, v1alpha3};
use fleet_grpc::socket::Socket;
use fleet_kubevirt::Hook;
use tokio::signal::unix::{SignalKind, signal};
use tonic::transport::Server;

/// Gives KubeVirt's virtual machines their vGPUs.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Folder that virt-launcher searches for hooks
    #[arg(long, value_name = "DIR", default_value = "/var/run/kubevirt-hooks")]
    folder: PathBuf,
    /// Name of the hook, and of its socket
    #[arg(long, value_name = "NAME", default_value = "gpu-mediator")]
    name: String,
    /// Request of a claim with a vGPU, for virtual machines without the annotation; may be given several times
    #[arg(long, value_name = "NAME")]
    request: Vec<String>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let Arguments { folder, name, request } = Arguments::parse();
    let (socket, incoming) = Socket::bind(&folder.join(format!("{name}.sock")))?;
    let hook = Hook { name, requests: request };
    let mut end = signal(SignalKind::terminate()).context("no signals")?;
    let serving = Server::builder()
        .add_service(InfoServer::new(hook.clone()))
        .add_service(v1alpha2::callbacks_server::CallbacksServer::new(hook.clone()))
        .add_service(v1alpha3::callbacks_server::CallbacksServer::new(hook))
        .serve_with_incoming(incoming);
    tokio::select! {
        served = serving => served.context("serving the hook")?,
        _ = end.recv() => {}
    }
    drop(socket);
    Ok(())
}
