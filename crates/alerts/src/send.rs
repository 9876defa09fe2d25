//! Delivery: SMTP, `sendmail`, webhook, ntfy.
//!
//! Each attempt is bounded in time and says in one sentence why it failed. Nothing here writes a log, and no
//! sentence has a secret in it: an address of ntfy or of a webhook may be one, so only its host is named.

use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use lettre::message::header::{ContentType, Header, HeaderName, HeaderValue};
use lettre::message::{Mailbox, MessageBuilder};
use lettre::transport::smtp::authentication::Credentials;
use lettre::transport::smtp::client::{Certificate, Tls, TlsParameters};
use lettre::transport::smtp::extension::ClientId;
use lettre::{AsyncSmtpTransport, AsyncTransport, Tokio1Executor};
use serde_json::json;

use crate::config::{AlertsConfig, MailConfig, NtfyConfig, Security, WebhookConfig, is_qualified};
use crate::message::{Message, News};
use crate::secret;
use hearth_health::Condition;

/// Time limit of one whole attempt. A server that sends a line now and then must not delay other alerts.
const PATIENCE: Duration = Duration::from_secs(20);
/// Longest that `sendmail` may take.
const SENDMAIL_PATIENCE: Duration = Duration::from_secs(30);
/// How often it is looked whether `sendmail` has ended.
const SENDMAIL_POLL: Duration = Duration::from_millis(20);

/// Sends a message on a way, as [`AlertsConfig::ways`] names it.
pub fn send(config: &AlertsConfig, way: &str, message: &Message) -> Result<(), String> {
    match (way.strip_prefix("mail:"), way) {
        (Some(to), _) => mail(
            config.mail.as_ref().ok_or("no mail is configured")?,
            to,
            message,
            &own_name(),
            PATIENCE,
        ),
        (_, "webhook") => webhook(
            config.webhook.as_ref().ok_or("no webhook is configured")?,
            message,
        ),
        (_, "ntfy") => ntfy(
            config.ntfy.as_ref().ok_or("no ntfy is configured")?,
            message,
        ),
        _ => Err(format!("nobody knows the way {way}")),
    }
}

/// A host's name as the right side of an address.
fn domain(host: &str) -> String {
    let good = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    let name: String = host.chars().filter(|c| good(*c)).collect();
    match name.trim_matches('.') {
        "" => "localhost".to_owned(),
        name => name.to_owned(),
    }
}

/// A header for programs that answer mails: no absence note comes back (RFC 3834).
#[derive(Clone)]
struct AutoSubmitted;

impl Header for AutoSubmitted {
    fn name() -> HeaderName {
        HeaderName::new_from_ascii_str("Auto-Submitted")
    }

    fn parse(_: &str) -> Result<AutoSubmitted, Box<dyn std::error::Error + Send + Sync>> {
        Ok(AutoSubmitted)
    }

    fn display(&self) -> HeaderValue {
        HeaderValue::new(AutoSubmitted::name(), "auto-generated".to_owned())
    }
}

/// The name that this host has.
fn own_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

/// What this host calls itself to a mail server: the first fully qualified name of what is set, the host in messages and
/// its own name; otherwise the address that it reaches the server from (RFC 5321, 4.1.4). Hosts are often called by their
/// short name, which servers refuse.
async fn helo(config: &MailConfig, host: &str, own: &str, server: &str, port: u16) -> ClientId {
    let names = config.helo.iter().map(String::as_str).chain([host, own]);
    for name in names {
        if is_qualified(name) {
            return ClientId::Domain(name.to_owned());
        }
    }
    let addresses = tokio::net::lookup_host((server, port)).await;
    for address in addresses.into_iter().flatten() {
        let any: SocketAddr = match address {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        // Nothing is sent: the kernel looks up the route.
        let socket = UdpSocket::bind(any).and_then(|socket| {
            socket.connect(address)?;
            socket.local_addr()
        });
        match socket.map(|local| local.ip()) {
            Ok(IpAddr::V4(ip)) => return ClientId::Ipv4(ip),
            Ok(IpAddr::V6(ip)) => return ClientId::Ipv6(ip),
            Err(_) => {}
        }
    }
    ClientId::Ipv4(Ipv4Addr::LOCALHOST)
}

fn compose(config: &MailConfig, to: &str, message: &Message) -> Result<lettre::Message, String> {
    let domain = domain(&message.host);
    let from = config
        .from
        .clone()
        .unwrap_or_else(|| format!("Hearth <hearth@{domain}>"));
    let from: Mailbox = from
        .parse()
        .map_err(|_| format!("“{from}” is no mail address"))?;
    let to: Mailbox = to
        .parse()
        .map_err(|_| format!("“{to}” is no mail address"))?;
    let builder: MessageBuilder = lettre::Message::builder()
        .from(from)
        .to(to)
        .subject(message.subject())
        // The same over attempts: whoever gets it twice can tell.
        .message_id(Some(format!(
            "<hearth.{}.{}@{domain}>",
            message.id, message.at
        )))
        .header(AutoSubmitted)
        .header(ContentType::TEXT_PLAIN);
    builder
        .body(message.text())
        .map_err(|e| format!("cannot write the mail: {e}"))
}

fn mail(
    config: &MailConfig,
    to: &str,
    message: &Message,
    own_name: &str,
    limit: Duration,
) -> Result<(), String> {
    let email = compose(config, to, message)?;
    let Some(server) = &config.server else {
        return sendmail(&config.sendmail, &email);
    };
    let parameters = || {
        let mut tls = TlsParameters::builder(server.clone());
        if let Some(file) = &config.ca_file {
            let pem =
                std::fs::read(file).map_err(|e| format!("cannot read {}: {e}", file.display()))?;
            let certificate = Certificate::from_pem(&pem)
                .map_err(|e| format!("{} is no certificate: {e}", file.display()))?;
            tls = tls.add_root_certificate(certificate);
        }
        tls.build().map_err(|e| format!("cannot encrypt: {e}"))
    };
    let (tls, port) = match config.security {
        Security::Starttls => (Tls::Required(parameters()?), 587),
        Security::Tls => (Tls::Wrapper(parameters()?), 465),
        Security::None => (Tls::None, 25),
    };
    let port = config.port.unwrap_or(port);
    let mut transport = AsyncSmtpTransport::<Tokio1Executor>::builder_dangerous(server)
        .tls(tls)
        .port(port)
        .timeout(Some(limit));
    let password = secret::read(
        config.password_file.as_deref(),
        config.password_credential.as_deref(),
    )?;
    if let (Some(user), Some(password)) = (&config.user, password) {
        transport =
            transport.credentials(Credentials::new(user.clone(), password.reveal().to_owned()));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| format!("cannot send a mail: {e}"))?;
    let sent = runtime.block_on(async {
        let send = async {
            let name = helo(config, &message.host, own_name, server, port).await;
            transport.hello_name(name).build().send(email).await
        };
        tokio::time::timeout(limit, send).await
    });
    // A name server that does not answer keeps a thread busy. Nothing waits for that thread.
    runtime.shutdown_background();
    match sent {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(e)) => Err(format!(
            "the mail server {server} did not take it: {}",
            chain(&e)
        )),
        Err(_) => Err(format!(
            "the mail server {server} did not take it within {} s",
            limit.as_secs_f64()
        )),
    }
}

/// An error with what caused it.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

fn sendmail(program: &Path, email: &lettre::Message) -> Result<(), String> {
    let name = program.display();
    let mut command = Command::new(program);
    // Until a line with a dot is no end, and bounces go to the sender.
    command.args(["-oi", "-t"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| {
            format!(
                "cannot start {name}: {e}; name a mail server in alerts.mail.server, or install one"
            )
        })?;
    let bytes = email.formatted();
    let stdin = child.stdin.take();
    // It may read nothing; a thread waits for it in our place, and ends with it.
    let writing =
        std::thread::spawn(move || stdin.map_or(Ok(()), |mut pipe| pipe.write_all(&bytes)));
    let end = Instant::now() + SENDMAIL_PATIENCE;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < end => std::thread::sleep(SENDMAIL_POLL),
            outcome => {
                // Nothing more can be done about one that cannot be killed.
                let _ = child.kill();
                let _ = child.wait();
                return Err(match outcome {
                    Err(e) => format!("cannot wait for {name}: {e}"),
                    Ok(_) => format!(
                        "{name} did not end within {} s",
                        SENDMAIL_PATIENCE.as_secs()
                    ),
                });
            }
        }
    };
    match writing.join() {
        Ok(Err(e)) => Err(format!("{name} did not take the mail: {e}")),
        _ if status.success() => Ok(()),
        _ => Err(format!("{name} ended with {status}")),
    }
}

fn agent(ca_file: Option<&Path>) -> Result<ureq::Agent, String> {
    let mut config = ureq::Agent::config_builder()
        .timeout_global(Some(PATIENCE))
        .http_status_as_error(false)
        .max_redirects(0);
    if let Some(file) = ca_file {
        let pem =
            std::fs::read(file).map_err(|e| format!("cannot read {}: {e}", file.display()))?;
        let certificates: Vec<ureq::tls::Certificate<'static>> = ureq::tls::parse_pem(&pem)
            .filter_map(|item| match item {
                Ok(ureq::tls::PemItem::Certificate(c)) => Some(c),
                _ => None,
            })
            .collect();
        if certificates.is_empty() {
            return Err(format!("there is no certificate in {}", file.display()));
        }
        let roots = ureq::tls::RootCerts::from(certificates);
        let tls = ureq::tls::TlsConfig::builder().root_certs(roots).build();
        config = config.tls_config(tls);
    }
    Ok(config.build().into())
}

/// The part of an address that is no secret.
fn host_of(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    authority.rsplit('@').next().unwrap_or_default()
}

fn outcome(
    who: &str,
    url: &str,
    answer: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
) -> Result<(), String> {
    let host = host_of(url);
    match answer {
        Ok(answer) if answer.status().is_success() => Ok(()),
        Ok(answer) => Err(format!(
            "the {who} at {host} answered with HTTP status {}",
            answer.status()
        )),
        Err(e) => Err(format!(
            "the {who} at {host} cannot be reached: {}",
            said(&e)
        )),
    }
}

/// Some of its errors hold the whole address.
fn said(error: &ureq::Error) -> String {
    match error {
        ureq::Error::BadUri(_) => "its address is malformed".to_owned(),
        e => chain(e),
    }
}

/// The signature of a body, as the header `Hearth-Signature` has it.
pub fn sign(key: &[u8], body: &[u8]) -> String {
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, key);
    let hex: String = (ring::hmac::sign(&key, body).as_ref().iter())
        .map(|b| format!("{b:02x}"))
        .collect();
    format!("sha256={hex}")
}

/// The body of a webhook.
pub fn body(message: &Message) -> Vec<u8> {
    let value = json!({
        "version": 1,
        "id": message.id,
        "at": message.at,
        "host": message.host,
        "condition": message.worst(),
        "subject": message.subject(),
        "entries": message.entries,
        "lost_before": message.lost_before,
    });
    value.to_string().into_bytes()
}

fn webhook(config: &WebhookConfig, message: &Message) -> Result<(), String> {
    let key = secret::read(
        config.secret_file.as_deref(),
        config.secret_credential.as_deref(),
    )?;
    let body = body(message);
    let mut request = agent(config.ca_file.as_deref())?
        .post(&config.url)
        .header("Content-Type", "application/json");
    if let Some(key) = key {
        request = request.header("Hearth-Signature", sign(key.reveal().as_bytes(), &body));
    }
    outcome("webhook", &config.url, request.send(&body[..]))
}

fn ntfy(config: &NtfyConfig, message: &Message) -> Result<(), String> {
    let token = secret::read(
        config.token_file.as_deref(),
        config.token_credential.as_deref(),
    )?;
    let over = message.entries.iter().all(|e| e.news == News::Over);
    let (priority, tag) = match message.worst() {
        _ if over => ("default", "white_check_mark"),
        Condition::Failed => ("urgent", "rotating_light"),
        Condition::Degraded => ("high", "warning"),
        _ => ("default", "information_source"),
    };
    // A header has no place for what is not ASCII; ntfy takes encoded words.
    let subject = message.subject();
    let title = if subject.is_ascii() {
        subject
    } else {
        subject
            .chars()
            .map(|c| if c.is_ascii() { c } else { '?' })
            .collect()
    };
    let mut request = agent(config.ca_file.as_deref())?
        .post(&config.url)
        .header("Title", title)
        .header("Priority", priority)
        .header("Tags", tag);
    if let Some(token) = token {
        request = request.header("Authorization", format!("Bearer {}", token.reveal()));
    }
    outcome("ntfy server", &config.url, request.send(message.text()))
}

/// Tells a service that waits for it that this host is alive.
pub fn heartbeat(url: &str) -> Result<(), String> {
    outcome("heartbeat", url, agent(None)?.get(url).call())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Entry;
    use hearth_health::Kind;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;
    use std::os::unix::fs::PermissionsExt;

    fn message() -> Message {
        Message {
            id: 7,
            at: 951_782_400_000,
            host: "host1".to_owned(),
            entries: vec![Entry {
                news: News::Begun,
                condition: Condition::Failed,
                kind: Kind::Device,
                name: "nvme0".to_owned(),
                code: "smart-failed".to_owned(),
                what: "the drive says “no”".to_owned(),
                remedy: "replace it".to_owned(),
                since: 1,
            }],
            lost_before: 0,
        }
    }

    /// A server that takes one request and answers with a status; gives back the request.
    fn server(status: &'static str) -> (String, std::thread::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/secret-path", listener.local_addr().unwrap());
        let work = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            let mut piece = [0; 4096];
            loop {
                let n = stream.read(&mut piece).unwrap();
                request.extend_from_slice(&piece[..n]);
                let text = String::from_utf8_lossy(&request).to_lowercase();
                let Some((head, body)) = text.split_once("\r\n\r\n") else {
                    continue;
                };
                let length = head
                    .lines()
                    .find_map(|l| l.strip_prefix("content-length: "));
                if n == 0 || length.is_none_or(|l| body.len() >= l.parse().unwrap()) {
                    break;
                }
            }
            write!(
                stream,
                "HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
            .unwrap();
            String::from_utf8_lossy(&request).into_owned()
        });
        (url, work)
    }

    fn secret(dir: &Path, text: &str) -> std::path::PathBuf {
        let path = dir.join("secret");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        path
    }

    #[test]
    fn a_webhook_gets_signed_json() {
        let dir = tempfile::tempdir().unwrap();
        let (url, work) = server("204 No Content");
        let config = WebhookConfig {
            url,
            secret_file: Some(secret(dir.path(), "key\n")),
            secret_credential: None,
            ca_file: None,
        };
        webhook(&config, &message()).unwrap();
        let request = work.join().unwrap();
        let (head, sent) = request.split_once("\r\n\r\n").unwrap();
        assert!(
            head.to_lowercase().contains(&format!(
                "hearth-signature: {}",
                sign(b"key", sent.as_bytes())
            )),
            "{head}"
        );
        let json: serde_json::Value = serde_json::from_str(sent).unwrap();
        assert_eq!(json["entries"][0]["code"], "smart-failed");
        assert_eq!(json["condition"], "failed");
        assert!(!request.contains("\r\nkey"));
    }

    #[test]
    fn the_signature_is_that_of_the_standard() {
        // RFC 4231, test case 2.
        let expected = "sha256=5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        assert_eq!(sign(b"Jefe", b"what do ya want for nothing?"), expected);
    }

    #[test]
    fn ntfy_gets_a_title_a_priority_and_the_text() {
        let (url, work) = server("200 OK");
        let config = NtfyConfig {
            url,
            token_file: None,
            token_credential: None,
            ca_file: None,
        };
        ntfy(&config, &message()).unwrap();
        let request = work.join().unwrap().to_lowercase();
        assert!(request.contains("priority: urgent"), "{request}");
        assert!(
            request.contains("title: [hearth host1] failed: device nvme0"),
            "{request}"
        );
        assert!(request.contains("what to do: replace it"), "{request}");
    }

    #[test]
    fn a_refusal_names_the_host_and_not_the_path() {
        let (url, work) = server("403 Forbidden");
        let config = NtfyConfig {
            url,
            token_file: None,
            token_credential: None,
            ca_file: None,
        };
        let error = ntfy(&config, &message()).unwrap_err();
        work.join().unwrap();
        assert!(
            error.contains("403") && error.contains("127.0.0.1"),
            "{error}"
        );
        assert!(!error.contains("secret-path"), "{error}");
        assert_eq!(host_of("https://user:pw@h:1/topic?x"), "h:1");
    }

    #[test]
    fn a_heartbeat_is_fetched_and_its_failure_tells_no_secret() {
        let (url, work) = server("200 OK");
        heartbeat(&url).unwrap();
        let request = work.join().unwrap();
        assert!(
            request.starts_with("GET /secret-path HTTP/1.1\r\n"),
            "{request}"
        );
        let (url, work) = server("500 Internal Server Error");
        let error = heartbeat(&url).unwrap_err();
        work.join().unwrap();
        assert!(
            error.contains("500") && !error.contains("secret-path"),
            "{error}"
        );
    }

    #[test]
    fn sendmail_gets_the_mail_and_its_failure_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("sendmail");
        let mail = dir.path().join("mail");
        let script = |text: String| {
            std::fs::write(&program, text).unwrap();
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        let config = MailConfig {
            to: vec!["a@example.org".to_owned()],
            from: None,
            server: None,
            port: None,
            helo: None,
            security: Security::default(),
            user: None,
            password_file: None,
            password_credential: None,
            ca_file: None,
            sendmail: program.clone(),
        };
        assert!(
            super::mail(&config, "a@example.org", &message(), "host1", PATIENCE)
                .unwrap_err()
                .contains("cannot start")
        );
        script(format!("#!/bin/sh\ncat > {}\n", mail.display()));
        super::mail(&config, "a@example.org", &message(), "host1", PATIENCE).unwrap();
        let sent = std::fs::read_to_string(&mail).unwrap();
        assert!(sent.contains("To: a@example.org"), "{sent}");
        assert!(
            sent.contains("Message-ID: <hearth.7.951782400000@host1>"),
            "{sent}"
        );
        assert!(
            sent.contains("Auto-Submitted: auto-generated\r\n"),
            "{sent}"
        );
        script("#!/bin/sh\ncat >/dev/null\nexit 75\n".to_owned());
        assert!(
            super::mail(&config, "a@example.org", &message(), "host1", PATIENCE)
                .unwrap_err()
                .contains("75")
        );
    }

    /// A server that takes one mail; gives back the client's name.
    fn mail_server() -> (u16, std::thread::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let work = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            stream.write_all(b"220 mx ESMTP\r\n").unwrap();
            let mut name = String::new();
            while let Some(Ok(line)) = lines.next() {
                let answer = match line.split(' ').next().unwrap_or_default() {
                    "EHLO" => {
                        line[5..].clone_into(&mut name);
                        "250 mx"
                    }
                    "DATA" => "354 go",
                    "QUIT" => "221 bye",
                    "." | "MAIL" | "RCPT" => "250 ok",
                    _ => continue,
                };
                stream
                    .write_all(format!("{answer}\r\n").as_bytes())
                    .unwrap();
                if answer.starts_with("221") {
                    break;
                }
            }
            name
        });
        (port, work)
    }

    #[test]
    fn helo_is_qualified_name_or_address() {
        let said = |helo: Option<&str>, host: &str, own: &str| {
            let (port, work) = mail_server();
            let config = MailConfig {
                to: Vec::new(),
                from: None,
                server: Some("127.0.0.1".to_owned()),
                port: Some(port),
                helo: helo.map(str::to_owned),
                security: Security::None,
                user: None,
                password_file: None,
                password_credential: None,
                ca_file: None,
                sendmail: "/nowhere".into(),
            };
            let message = Message {
                host: host.to_owned(),
                ..message()
            };
            super::mail(&config, "a@example.org", &message, own, PATIENCE).unwrap();
            work.join().unwrap()
        };
        assert_eq!(said(None, "kvm1", "kvm1"), "[127.0.0.1]");
        assert_eq!(said(None, "kvm1", "localhost.localdomain"), "[127.0.0.1]");
        assert_eq!(said(None, "kvm1", "kvm1.example.org"), "kvm1.example.org");
        assert_eq!(said(None, "vm.example.org", "kvm1"), "vm.example.org");
        assert_eq!(
            said(Some("mx.example.org"), "vm.example.org", "kvm1"),
            "mx.example.org"
        );
        for name in [
            "kvm1",
            "",
            "a..b",
            "-a.org",
            "a_b.org",
            "10.0.0.1",
            "kvm1.local",
            "a.b.",
            "a b.org",
        ] {
            assert!(!is_qualified(name), "{name}");
        }
    }

    /// A server that sends a line now and then times out like a silent one.
    #[test]
    fn dribbling_mail_server_is_given_up() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // Ends with the client. The pause is the pace of the lines: nothing is waited for.
            while stream.write_all(b"220-wait\r\n").is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let config = MailConfig {
            to: Vec::new(),
            from: None,
            server: Some("127.0.0.1".to_owned()),
            port: Some(port),
            helo: None,
            security: Security::None,
            user: None,
            password_file: None,
            password_credential: None,
            ca_file: None,
            sendmail: "/nowhere".into(),
        };
        let limit = Duration::from_millis(500);
        let why = mail(&config, "a@example.org", &message(), "host1", limit).unwrap_err();
        assert!(why.contains("did not take it within 0.5 s"), "{why}");
        server.join().unwrap();
    }
}
