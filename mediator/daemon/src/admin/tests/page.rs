//! Tests of the web page and its server.

use crate::fixture::Served;
use std::io::{Read, Write};
use std::net::TcpStream;

/// Sends a request to the page's server, and returns the response.
fn ask(served: &Served, request: &str, host: &str) -> String {
    let mut stream = TcpStream::connect(served.page).unwrap();
    write!(stream, "{request} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn server_of_the_page_answers_reads_of_this_host_only() {
    let served = Served::new();
    let local = served.page.to_string();
    for (request, host, status) in [
        ("GET /", local.as_str(), 200),
        ("HEAD /", local.as_str(), 200),
        ("GET /v1/cards", "localhost", 200),
        ("GET /metrics", "[::1]:9470", 200),
        ("GET /nothing", local.as_str(), 404),
        ("POST /", local.as_str(), 405),
        ("DELETE /v1/vms/a", local.as_str(), 403),
        ("POST /v1/daemon/upgrade", local.as_str(), 403),
        ("GET /", "evil.example", 421),
        ("GET /v1/cards", "evil.example:9470", 421),
        ("GET /v1/cards", "localhost.evil.example", 421),
    ] {
        let answer = ask(&served, request, host);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request} for {host}: {answer}");
        if status != 421 {
            assert!(answer.contains("x-content-type-options: nosniff"), "{answer}");
        }
    }
    let page = ask(&served, "GET /", &local);
    assert!(page.contains("content-security-policy: default-src 'none'; script-src 'sha256-"), "{page}");
    assert!(page.contains("<title>gpu-mediator</title>"), "{page}");
}
