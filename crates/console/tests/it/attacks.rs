//! What somebody may try who is not let in, or not as far as he wants: over a real connection to a real console.
//!
//! Behind it stands a socket that writes down what reaches it, because what matters most is what must not.

use crate::common;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_console::{Accounts, Config, Home, Reach, Role, Settings, make_link};
use tokio::sync::watch;

const PASSWORD: &str = "correct horse battery";

/// A console on a port of its own, and what stands for the daemon.
struct World {
    dir: tempfile::TempDir,
    home: Home,
    address: SocketAddr,
    reached: Arc<Mutex<Vec<String>>>,
    stop: watch::Sender<bool>,
    serving: Option<JoinHandle<()>>,
}

/// What came back.
#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: String,
    /// The body's bytes.
    data: Vec<u8>,
}

/// A session's two halves.
#[derive(Clone, Debug, Default)]
struct Session {
    cookie: String,
    token: String,
}

/// Writes down each request that comes, whole, and answers it.
fn daemon(socket: &Path, reached: Arc<Mutex<Vec<String>>>) {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.unwrap());
            let mut text = String::new();
            while !text.ends_with("\r\n\r\n") && stream.read_line(&mut text).unwrap() > 0 {}
            let length = text.lines().find_map(|l| {
                let (name, value) = l.split_once(':')?;
                let length = name.eq_ignore_ascii_case("content-length");
                length.then(|| value.trim().parse::<usize>().unwrap())
            });
            let mut body = vec![0; length.unwrap_or(0)];
            stream.read_exact(&mut body).unwrap();
            text.push_str(&String::from_utf8(body).unwrap());
            reached.lock().unwrap().push(text);
            let answer = "{\"from\":\"daemon\",\"name\":\"<script>alert(1)</script>\"}";
            // A client that has gone wants no answer.
            let _ = write!(
                stream.get_mut(),
                "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nset-cookie: a=b\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{answer}",
                answer.len()
            );
        }
    });
}

/// An address that is free, and stays so unless somebody else takes it in between.
fn free() -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

impl World {
    fn new() -> World {
        World::reaching(|_| Reach::default())
    }

    /// One on whose host a file says of what users may reach what `reach` makes of its directory.
    fn reaching(reach: impl FnOnce(&Path) -> Reach) -> World {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path());
        std::fs::create_dir(dir.path().join("vms")).unwrap();
        std::fs::write(dir.path().join("vms/a.raw"), "a").unwrap();
        let mut accounts = Accounts::default();
        accounts.add("anna", PASSWORD, Role::Operator).unwrap();
        accounts.add("board", PASSWORD, Role::Viewer).unwrap();
        accounts.keep(&home).unwrap();
        let settings = Settings {
            enabled: true,
            listen: free(),
            paths: vec![dir.path().join("vms")],
            ..Settings::default()
        };
        home.keep(&settings).unwrap();
        let reached = Arc::default();
        let socket = dir.path().join("api.sock");
        daemon(&socket, Arc::clone(&reached));
        let config = Config {
            home: home.clone(),
            reach: reach(dir.path()),
            monitor: socket.clone(),
            socket,
            host: "node-7".to_owned(),
            attach: None,
        };
        let (stop, stopped) = watch::channel(false);
        let serving = common::serve(config, stopped);
        let world = World {
            dir,
            home,
            address: settings.listen,
            reached,
            stop,
            serving: Some(serving),
        };
        world.wait(true);
        world
    }

    /// Until somebody listens, or nobody does.
    fn wait(&self, up: bool) {
        common::wait(self.address, up);
    }

    fn raw(&self, request: &[u8]) -> Answer {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        // It may be answered and closed before it was taken whole.
        let _ = stream.write_all(request);
        let mut text = Vec::new();
        let _ = stream.read_to_end(&mut text);
        let end = text.windows(4).position(|part| part == b"\r\n\r\n");
        let data = end.map_or(Vec::new(), |end| text[end + 4..].to_vec());
        let text = String::from_utf8_lossy(&text).into_owned();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head.get(9..12).and_then(|s| s.parse().ok()).unwrap_or(0);
        Answer {
            status,
            head: head.to_owned(),
            body: body.to_owned(),
            data,
        }
    }

    fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let mut text = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
        if !headers.iter().any(|(name, _)| *name == "Host") {
            text += &format!("Host: {}\r\n", self.address);
        }
        for (name, value) in headers {
            text += &format!("{name}: {value}\r\n");
        }
        text += &format!("Content-Length: {}\r\n\r\n{body}", body.len());
        self.raw(text.as_bytes())
    }

    fn with(&self, session: &Session, method: &str, path: &str, body: &str) -> Answer {
        self.ask(method, path, &session.headers(), body)
    }

    fn log_in(&self, how: &str) -> Result<Session, Answer> {
        let answer = self.ask(
            "POST",
            "/console/login",
            &[("Content-Type", "application/json")],
            how,
        );
        if answer.status != 200 {
            return Err(answer);
        }
        let cookie = answer.header("set-cookie").unwrap();
        assert!(
            cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"),
            "{cookie}"
        );
        let token = answer.body.split("\"token\":\"").nth(1).unwrap();
        Ok(Session {
            cookie: cookie.split(';').next().unwrap().to_owned(),
            token: token.split('"').next().unwrap().to_owned(),
        })
    }

    fn account(&self, name: &str) -> Session {
        self.log_in(&format!(
            "{{\"name\":\"{name}\",\"password\":\"{PASSWORD}\"}}"
        ))
        .unwrap()
    }

    fn link(&self, role: Role) -> String {
        format!("{{\"link\":\"{}\"}}", make_link(&self.home, role).unwrap())
    }

    /// What has reached the daemon since the last time.
    fn reached(&self) -> Vec<String> {
        std::mem::take(&mut self.reached.lock().unwrap())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        if let Some(serving) = self.serving.take() {
            let _ = serving.join();
        }
    }
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().skip(1).filter_map(|l| l.split_once(": "));
        lines.find_map(|(n, value)| n.eq_ignore_ascii_case(name).then_some(value))
    }
}

impl Session {
    fn headers(&self) -> Vec<(&'static str, &str)> {
        vec![
            ("Cookie", self.cookie.as_str()),
            ("Hearth-Token", self.token.as_str()),
            ("Content-Type", "application/json"),
        ]
    }
}

const CALLS: [(&str, &str); 8] = [
    ("GET", "/v1/pool"),
    ("GET", "/v1/disks"),
    ("GET", "/v1/events?limit=1"),
    ("GET", "/v1/openapi.json"),
    ("POST", "/v1/disks/vm1/flush"),
    ("POST", "/v1/disks/vm1/remove"),
    ("GET", "/console/session"),
    ("GET", "/console/browse"),
];

#[test]
fn nobody_gets_in_without_a_session() {
    let world = World::new();
    let zeros = "0".repeat(64);
    let cookie = format!("hearth-{}={zeros}", world.address.port());
    for (method, path) in CALLS {
        for headers in [
            vec![],
            vec![("Hearth-Token", zeros.as_str())],
            vec![("Cookie", cookie.as_str())],
            vec![
                ("Cookie", cookie.as_str()),
                ("Hearth-Token", zeros.as_str()),
            ],
            vec![("Authorization", "Bearer x")],
            vec![("Hearth-For", "anna")],
        ] {
            let answer = world.ask(method, path, &headers, "");
            assert_eq!(answer.status, 401, "{method} {path} {headers:?}");
        }
    }
    assert_eq!(world.reached(), [""; 0]);
}

#[test]
fn a_stolen_cookie_opens_nothing_and_neither_does_the_other_half() {
    let world = World::new();
    let anna = world.account("anna");
    let board = world.account("board");
    for (method, path) in CALLS {
        for thief in [
            Session {
                token: String::new(),
                ..anna.clone()
            },
            Session {
                token: board.token.clone(),
                ..anna.clone()
            },
            Session {
                cookie: board.cookie.clone(),
                ..anna.clone()
            },
            Session {
                cookie: String::new(),
                ..anna.clone()
            },
        ] {
            assert_eq!(world.with(&thief, method, path, "{}").status, 401, "{path}");
        }
    }
    assert_eq!(world.reached(), [""; 0]);
    // Logging out ends it for whoever has both halves.
    assert_eq!(world.with(&anna, "GET", "/v1/pool", "").status, 200);
    assert_eq!(world.with(&anna, "POST", "/console/logout", "").status, 200);
    assert_eq!(world.with(&anna, "GET", "/v1/pool", "").status, 401);
    assert_eq!(world.with(&board, "GET", "/v1/pool", "").status, 200);
}

#[test]
fn sessions_end_with_their_account() {
    let world = World::new();
    let (anna, board) = (world.account("anna"), world.account("board"));
    let mut accounts = Accounts::read(&world.home).unwrap();
    accounts.set_password("anna", "another password").unwrap();
    accounts.keep(&world.home).unwrap();
    assert_eq!(world.with(&anna, "GET", "/v1/pool", "").status, 401);
    assert_eq!(world.with(&board, "GET", "/v1/pool", "").status, 200);
    accounts.remove("board").unwrap();
    accounts.keep(&world.home).unwrap();
    assert_eq!(world.with(&board, "GET", "/v1/pool", "").status, 401);
}

#[test]
fn other_sites_neither_change_nor_read_anything() {
    let world = World::new();
    let anna = world.account("anna");
    let host = world.address.to_string();
    let elsewhere = [
        vec![("Origin", "https://evil.example")],
        vec![("Origin", "null")],
        vec![("Sec-Fetch-Site", "cross-site")],
        vec![("Sec-Fetch-Site", "same-site")],
        vec![
            ("Sec-Fetch-Site", "cross-site"),
            ("Accept", "text/event-stream"),
        ],
        vec![("Host", "evil.example")],
        vec![("Host", "127.0.0.1.evil.example")],
        vec![
            ("Upgrade", "websocket"),
            ("Sec-WebSocket-Version", "13"),
            ("Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA=="),
        ],
    ];
    for more in elsewhere {
        for (method, path) in CALLS {
            // Even with all secrets: the browser says where it comes from.
            let headers = [anna.headers(), more.clone()].concat();
            let answer = world.ask(method, path, &headers, "{}");
            assert!(
                matches!(answer.status, 403 | 421),
                "{more:?} {path}: {}",
                answer.status
            );
            assert!(answer.header("access-control-allow-origin").is_none());
        }
        let link = world.link(Role::Operator);
        let headers = [vec![("Content-Type", "application/json")], more.clone()].concat();
        let answer = world.ask("POST", "/console/login", &headers, &link);
        assert!(
            matches!(answer.status, 403 | 421),
            "{more:?}: {}",
            answer.status
        );
    }
    // What a form can send, with the cookie that the browser adds.
    for kind in [
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "text/plain",
    ] {
        let headers = [("Cookie", anna.cookie.as_str()), ("Content-Type", kind)];
        let answer = world.ask("POST", "/v1/disks/vm1/remove", &headers, "{\"yes\":true}");
        assert_eq!(answer.status, 401, "{kind}");
        let answer = world.ask(
            "POST",
            "/console/login",
            &[("Content-Type", kind)],
            &world.link(Role::Operator),
        );
        assert_eq!(answer.status, 400, "{kind}");
    }
    // Asking whether it would be allowed is answered with no.
    let preflight = [
        ("Origin", "https://evil.example"),
        ("Access-Control-Request-Method", "POST"),
        ("Access-Control-Request-Headers", "hearth-token"),
    ];
    let answer = world.ask("OPTIONS", "/v1/disks/vm1/remove", &preflight, "");
    assert_eq!(answer.status, 403);
    assert_eq!(world.reached(), [""; 0]);
    // Our own page is let through.
    let own = format!("http://{host}");
    let headers = [
        anna.headers(),
        vec![("Origin", own.as_str()), ("Sec-Fetch-Site", "same-origin")],
    ]
    .concat();
    assert_eq!(world.ask("GET", "/v1/pool", &headers, "").status, 200);
    assert_eq!(world.reached().len(), 1);
}

#[test]
fn paths_do_not_climb() {
    let world = World::new();
    let anna = world.account("anna");
    for path in [
        "/../../../../etc/passwd",
        "/assets/../../../etc/passwd",
        "/assets/%2e%2e/%2e%2e/etc/passwd",
        "/assets/..%2f..%2fetc%2fpasswd",
        "//etc/passwd",
        "/etc/passwd",
        "/index.html/../../x",
        "/settings.json",
        "/console",
    ] {
        let answer = world.ask("GET", path, &[], "");
        assert!(
            matches!(answer.status, 400 | 401 | 404),
            "{path}: {}",
            answer.status
        );
        assert!(!answer.body.contains("root:"), "{path}");
    }
    for path in [
        "/v1/disks/../pool/export",
        "/v1/pool/export",
        "/v1/disks/a/../../pool/export",
        "/v1/datastores",
        "/v1/../v1/pool/export",
        "/v1/disks//flush",
    ] {
        assert_eq!(world.with(&anna, "POST", path, "{}").status, 404, "{path}");
    }
    assert_eq!(world.reached(), [""; 0]);
    // A name that looks like a path arrives as the name of a disk.
    world.with(&anna, "POST", "/v1/disks/..%2F..%2Fpool%2Fexport/flush", "");
    let reached = world.reached();
    assert!(
        reached[0].starts_with("POST /v1/disks/%2E%2E%2F%2E%2E%2Fpool%2Fexport/flush HTTP/1.1\r\n"),
        "{reached:?}"
    );
    // And one that looks like a header does not become one.
    world.with(&anna, "GET", "/v1/disks/a%0d%0aHearth-For:%20root", "");
    let reached = world.reached();
    assert!(
        !reached[0].to_lowercase().contains("hearth-for: root"),
        "{reached:?}"
    );
    for outside in ["/etc", "/", "/proc/self/environ", "../..", "%2Fetc"] {
        let path = format!("/console/browse?path={}", outside.replace('/', "%2F"));
        let answer = world.with(&anna, "GET", &path, "");
        assert_eq!(answer.status, 403, "{outside}: {}", answer.body);
    }
    let inside = world.dir.path().join("vms").display().to_string();
    let path = format!("/console/browse?path={}", inside.replace('/', "%2F"));
    let answer = world.with(&anna, "GET", &path, "");
    assert!(answer.body.contains("a.raw"), "{}", answer.body);
}

#[test]
fn an_operator_opens_nothing_that_is_not_listed() {
    let world = World::new();
    let anna = world.account("anna");
    let vms: PathBuf = std::fs::canonicalize(world.dir.path().join("vms")).unwrap();
    std::os::unix::fs::symlink("/etc/shadow", vms.join("link.raw")).unwrap();
    std::os::unix::fs::symlink("/dev/null", vms.join("device.raw")).unwrap();
    let json = "json:{\\\"driver\\\":\\\"file\\\",\\\"filename\\\":\\\"/etc/shadow\\\"}";
    for origin in [
        "/etc/shadow",
        "/dev/sda",
        "/dev/null",
        &format!("{}/link.raw", vms.display()),
        &format!("{}/device.raw", vms.display()),
        &format!("qcow2:{}/link.raw", vms.display()),
        &format!("{}/../settings", vms.display()),
        json,
        &format!("qcow2:{json}"),
        "https://evil.example/x.raw",
        "nbd://127.0.0.1/x",
        "nbd+unix:///x?socket=/run/docker.sock",
    ] {
        let body = format!("{{\"name\":\"a\",\"origin\":\"{origin}\"}}");
        let answer = world.with(&anna, "POST", "/v1/disks", &body);
        assert_eq!(answer.status, 403, "{origin}: {}", answer.body);
        let leg = format!("{{\"add\":\"{origin}\"}}");
        let answer = world.with(&anna, "POST", "/v1/disks/a/mirror", &leg);
        assert_eq!(answer.status, 403, "{origin}: {}", answer.body);
    }
    let backing = format!(
        "{{\"name\":\"a\",\"origin\":\"{}/a.raw\",\"allow_backing\":true}}",
        vms.display()
    );
    assert_eq!(world.with(&anna, "POST", "/v1/disks", &backing).status, 403);
    let recording = "{\"file\":\"/etc/cron.d/x\"}";
    let answer = world.with(&anna, "POST", "/v1/disks/a/recording", recording);
    assert_eq!(answer.status, 403);
    assert_eq!(world.reached(), [""; 0]);

    let good = format!("{{\"name\":\"a\",\"origin\":\"{}/a.raw\"}}", vms.display());
    assert_eq!(world.with(&anna, "POST", "/v1/disks", &good).status, 200);
    let reached = world.reached();
    assert!(reached[0].contains("hearth-for: anna\r\n"), "{reached:?}");
    assert!(!reached[0].to_lowercase().contains("cookie"), "{reached:?}");
    assert!(!reached[0].contains(&anna.token), "{reached:?}");
}

/// What was listed when the console was enabled is not reached where the host's own file lists something else.
#[test]
fn the_hosts_own_file_says_what_is_reached() {
    let world = World::reaching(|dir| {
        std::fs::create_dir(dir.join("others")).unwrap();
        std::fs::write(dir.join("others/b.raw"), "b").unwrap();
        Reach {
            allow_path: Some(vec![dir.join("others")]),
            allow_server: None,
        }
    });
    let anna = world.account("anna");
    let add = |path: &str| {
        let path = world.dir.path().join(path);
        let body = format!("{{\"name\":\"a\",\"origin\":\"{}\"}}", path.display());
        world.with(&anna, "POST", "/v1/disks", &body).status
    };
    assert_eq!(add("vms/a.raw"), 403);
    assert_eq!(world.reached(), [""; 0]);
    assert_eq!(add("others/b.raw"), 200);
    let listed = world.with(&anna, "GET", "/console/browse", "").body;
    assert!(
        listed.contains("others") && !listed.contains("vms"),
        "{listed}"
    );
}

#[test]
fn a_viewer_sees_and_changes_nothing() {
    let world = World::new();
    let link = world.log_in(&world.link(Role::Viewer)).unwrap();
    for viewer in [world.account("board"), link] {
        for path in [
            "/v1/disks",
            "/v1/disks/vm1/flush",
            "/v1/disks/vm1/remove",
            "/v1/disks/vm1/recording",
            "/v1/disks/vm1/accept-loss",
            "/v1/advice/apply",
            "/v1/disks/vm1/histogram/reset",
        ] {
            assert_eq!(
                world.with(&viewer, "POST", path, "{}").status,
                403,
                "{path}"
            );
        }
        assert_eq!(
            world.with(&viewer, "PATCH", "/v1/disks/vm1", "{}").status,
            403
        );
        assert_eq!(
            world.with(&viewer, "GET", "/console/browse", "").status,
            403
        );
        assert_eq!(world.reached(), [""; 0]);
        assert_eq!(world.with(&viewer, "GET", "/v1/disks/vm1", "").status, 200);
        assert_eq!(world.reached().len(), 1);
    }
}

#[test]
fn bodies_and_headers_are_bounded() {
    let world = World::new();
    let anna = world.account("anna");
    let large = "x".repeat((64 << 10) + 1);
    assert_eq!(world.with(&anna, "POST", "/v1/disks", &large).status, 413);
    // Before anybody is known.
    let json = [("Content-Type", "application/json")];
    assert_eq!(
        world.ask("POST", "/console/login", &json, &large).status,
        413
    );
    let password = "p".repeat(60 << 10);
    let answer = world.log_in(&format!(
        "{{\"name\":\"anna\",\"password\":\"{password}\"}}"
    ));
    assert_eq!(answer.unwrap_err().status, 401);
    let chunked = format!(
        "POST /console/login HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nConnection: close\r\n\
         Transfer-Encoding: chunked\r\n\r\n11000\r\n{}",
        world.address,
        "x".repeat(0x11000)
    );
    assert_eq!(world.raw(chunked.as_bytes()).status, 413);
    let header = "h".repeat(64 << 10);
    assert_eq!(
        world.ask("GET", "/", &[("X-Large", &header)], "").status,
        431
    );
    assert_eq!(world.raw(b"not http at all\r\n\r\n").status, 400);
    assert_eq!(world.reached(), [""; 0]);
    assert_eq!(world.with(&anna, "GET", "/v1/pool", "").status, 200);
}

#[test]
fn guessing_gets_nowhere() {
    let world = World::new();
    let guess = |name: &str, n: usize| {
        let how = format!("{{\"name\":\"{name}\",\"password\":\"guess number {n}\"}}");
        world.log_in(&how).unwrap_err().status
    };
    // Five are wrong; then comes a pause, for every name, and with the right password as well.
    for n in 0..5 {
        assert_eq!(guess(if n % 2 == 0 { "anna" } else { "nobody" }, n), 401);
    }
    let how = format!("{{\"name\":\"anna\",\"password\":\"{PASSWORD}\"}}");
    let answers: Vec<u16> = (0..20).map(|n| guess("board", n)).collect();
    let refused = answers.iter().filter(|s| **s == 429).count();
    assert!(refused >= 18, "{answers:?}");
    let answer = world.log_in(&how).unwrap_err();
    assert_eq!(answer.status, 429);
    assert!(answer.header("retry-after").is_some());
    // A link is no guess: 256 bits need no throttling, and the administrator gets in.
    assert!(world.log_in(&world.link(Role::Operator)).is_ok());
    assert_eq!(world.reached(), [""; 0]);
}

#[test]
fn guesses_sent_at_once_are_counted_one_by_one() {
    let world = World::new();
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let world = &world;
        let all: Vec<_> = (0..32)
            .map(|n| {
                let how = format!("{{\"name\":\"anna\",\"password\":\"guess number {n}\"}}");
                scope.spawn(move || world.log_in(&how).unwrap_err().status)
            })
            .collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let checked = statuses.iter().filter(|s| **s == 401).count();
    assert!(checked <= 7, "{statuses:?}");
}

#[test]
fn names_never_become_part_of_a_page() {
    let world = World::new();
    let anna = world.account("anna");
    let answer = world.with(&anna, "GET", "/v1/disks/%3Cscript%3E", "");
    // Whatever the daemon calls it, it is data, and from the daemon comes nothing but data.
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
    assert_eq!(answer.header("set-cookie"), None);
    for path in ["/", "/v1/pool", "/nothing"] {
        let answer = world.ask("GET", path, &[], "");
        let policy = answer.header("content-security-policy").unwrap();
        assert!(policy.contains("default-src 'none'"), "{policy}");
        assert!(
            !policy.contains("unsafe") && !policy.contains('*') && !policy.contains("http"),
            "{policy}"
        );
        assert!(policy.contains("frame-ancestors 'none'"), "{policy}");
        assert_eq!(answer.header("x-frame-options"), Some("DENY"));
        assert_eq!(answer.header("referrer-policy"), Some("no-referrer"));
    }
}

fn gunzipped(data: &[u8]) -> String {
    let mut text = String::new();
    flate2::read::GzDecoder::new(data)
        .read_to_string(&mut text)
        .unwrap();
    text
}

#[test]
fn answers_passed_on_are_compressed_if_accepted() {
    let world = World::new();
    let anna = world.account("anna");
    let plain = world.with(&anna, "GET", "/v1/disks", "");
    assert_eq!(plain.header("content-encoding"), None);
    // Over HTTP/1.0 a body is not sent in chunks.
    let request = format!(
        "GET /v1/disks HTTP/1.0\r\nHost: {}\r\nCookie: {}\r\nHearth-Token: {}\r\n\
         Accept-Encoding: br, gzip\r\n\r\n",
        world.address, anna.cookie, anna.token
    );
    let packed = world.raw(request.as_bytes());
    assert_eq!(packed.header("content-encoding"), Some("gzip"));
    assert_eq!(packed.header("vary"), Some("accept-encoding"));
    assert_eq!(packed.header("cache-control"), Some("no-store"));
    assert_eq!(gunzipped(&packed.data), plain.body);
    let mut headers = anna.headers();
    headers.push(("Accept-Encoding", "gzip;q=0"));
    let refused = world.ask("GET", "/v1/disks", &headers, "");
    assert_eq!(refused.header("content-encoding"), None);
    // The daemon itself is asked for plain answers.
    for request in world.reached() {
        assert!(
            !request.to_lowercase().contains("accept-encoding"),
            "{request}"
        );
    }
}

/// The length of a compressed answer discloses a secret in it to those who choose a part of it.
#[test]
fn answers_with_secrets_are_not_compressed() {
    let world = World::new();
    let anna = world.account("anna");
    let json = ("Content-Type", "application/json");
    let gzip = ("Accept-Encoding", "gzip");
    let how = format!("{{\"name\":\"anna\",\"password\":\"{PASSWORD}\"}}");
    let login = world.ask("POST", "/console/login", &[json, gzip], &how);
    assert_eq!(login.status, 200);
    assert_eq!(login.header("content-encoding"), None);
    let mut headers = anna.headers();
    headers.push(gzip);
    for (method, path, status) in [
        ("GET", "/console/session", 200),
        ("POST", "/v1/disks/vm1/flush", 200),
        ("GET", "/v1/nothing", 404),
    ] {
        let answer = world.ask(method, path, &headers, "");
        assert_eq!(answer.status, status, "{path}");
        assert_eq!(answer.header("content-encoding"), None, "{path}");
    }
}

#[test]
fn host_name_needs_a_session() {
    let world = World::new();
    let board = world.account("board");
    let told = world.with(&board, "GET", "/console/session", "");
    assert!(told.body.contains("\"host\":\"node-7\""), "{}", told.body);
    for path in ["/", "/console/session"] {
        let answer = world.ask("GET", path, &[], "");
        assert!(!answer.body.contains("node-7"), "{path}");
        assert!(!answer.head.contains("node-7"), "{path}");
    }
}

#[test]
fn there_is_no_console_unless_it_is_enabled() {
    let world = World::new();
    let anna = world.account("anna");
    let settings = world.home.settings().unwrap();
    let off = Settings {
        enabled: false,
        ..settings.clone()
    };
    world.home.keep(&off).unwrap();
    world.wait(false);
    world.home.keep(&settings).unwrap();
    world.wait(true);
    // And who was logged in is not any more.
    assert_eq!(world.with(&anna, "GET", "/v1/pool", "").status, 401);
}

/// More silent connections than places do not keep out a client with a request.
#[test]
fn silent_connections_keep_nobody_out() {
    let world = World::new();
    let silent: Vec<TcpStream> = (0..600)
        .map(|_| TcpStream::connect(world.address).unwrap())
        .collect();
    for _ in 0..20 {
        assert_eq!(world.ask("GET", "/", &[], "").status, 200);
    }
    drop(silent);
}
