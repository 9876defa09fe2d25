//! A console that other hosts can reach speaks TLS and nothing else.

use crate::common;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use hearth_console::{Accounts, Config, Home, Reach, Role, Settings, TlsFiles};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tokio::sync::watch;

fn ask(stream: &mut (impl Read + Write), request: &str) -> String {
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    // Its end is an end, however it comes.
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    stream
}

#[test]
fn cookies_go_over_tls_only_and_nothing_is_said_in_the_clear() {
    let dir = tempfile::tempdir().unwrap();
    let home = Home::new(dir.path());
    let mut accounts = Accounts::default();
    accounts
        .add("anna", "correct horse", Role::Operator)
        .unwrap();
    accounts.keep(&home).unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let certificate = params.self_signed(&key).unwrap();
    let files = TlsFiles {
        cert: dir.path().join("cert.pem"),
        key: dir.path().join("key.pem"),
    };
    std::fs::write(&files.cert, certificate.pem()).unwrap();
    std::fs::write(&files.key, key.serialize_pem()).unwrap();
    let listen = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    home.keep(&Settings {
        enabled: true,
        listen,
        tls: Some(files),
        ..Settings::default()
    })
    .unwrap();
    let config = Config {
        home,
        reach: Reach::default(),
        socket: dir.path().join("none.sock"),
        monitor: dir.path().join("none.sock"),
        host: "localhost".to_owned(),
        attach: None,
    };
    let (stop, stopped) = watch::channel(false);
    let serving = common::serve(config, stopped);
    common::wait(listen, true);

    let plain = ask(
        &mut connect(listen),
        "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    );
    assert!(!plain.contains("HTTP/1.1"), "{plain}");

    let mut roots = RootCertStore::empty();
    roots.add(certificate.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let client = Arc::new(client);
    let over_tls = |request: &str| {
        let name = ServerName::try_from("localhost").unwrap();
        let session = ClientConnection::new(client.clone(), name).unwrap();
        ask(&mut StreamOwned::new(session, connect(listen)), request)
    };
    // Any name does: which one it is, the certificate says.
    let page = over_tls("GET / HTTP/1.1\r\nHost: cache.example\r\nConnection: close\r\n\r\n");
    assert!(page.starts_with("HTTP/1.1 200"), "{page}");
    assert!(page.contains("strict-transport-security: "), "{page}");
    let body = "{\"name\":\"anna\",\"password\":\"correct horse\"}";
    let login = |origin: &str| {
        over_tls(&format!(
            "POST /console/login HTTP/1.1\r\nHost: cache.example\r\nOrigin: {origin}\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        ))
    };
    let answer = login("https://cache.example");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let cookie = answer.lines().find(|l| l.starts_with("set-cookie: "));
    let cookie = cookie.unwrap();
    assert!(cookie.contains(" __Host-hearth-"), "{cookie}");
    assert!(cookie.contains("; Secure"), "{cookie}");
    assert!(login("http://cache.example").starts_with("HTTP/1.1 403"));

    let _ = stop.send(true);
    serving.join().unwrap();
}
