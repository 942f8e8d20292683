#!/usr/bin/env bash
# The first set-up of networked workers as docs/operations.md has it: keys, a daemon with tenants
# that listens for TLS, and the client programs; what they say when a credential is wrong; and the
# listeners that do not open.
#
#   tests/clients/tls.sh BIN_DIR
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
bin=$1
says() { grep -qE -e "$1" "$dir/err.log" "$dir/out" || die "no \"$1\""; } # on either
# knows WORDS TENANT: attnctl's answer to these words
knows() { "${op[@]}" --json $1 >"$dir/out" && grep -q "\"tenant\": \"$2\"" "$dir/out"; }
knows_not() { "${op[@]}" --json $1 >"$dir/out" && ! grep -q "\"tenant\": \"$2\"" "$dir/out"; }
ctl=$bin/attnctl load=$bin/attnload keys=$dir/etc/keys
host=localhost
getent hosts $host >"$dir/out" || host=127.0.0.1 # a bare system has no /etc/hosts

# --- keys
expect 0 "$ctl" keys "$keys" --host localhost --host 127.0.0.1 --tenant alpha --tenant beta
says "^tls_key = $keys/server.key$"
says "^export ATTND_KEY_FILE=$keys/alpha.token$"
[[ $(stat -c %a "$keys"/* | sort -u)$(stat -c %a "$keys") == 600700 ]] || die "modes: $(ls -l "$keys")"
for name in alpha beta; do # 32 random bytes in hexadecimal; the daemon's file has their hash
  [[ $(<"$keys/$name.token") =~ ^[0-9a-f]{64}$ ]] || die "no token of 256 bits: $(<"$keys/$name.token")"
  grep -q "$(tr -d '\n' <"$keys/$name.token" | sha256sum | cut -d' ' -f1)" "$keys/tenants.conf" || die "not its hash"
  grep -q "$(<"$keys/$name.token")" "$keys/tenants.conf" && die "the token itself is in tenants.conf"
done
sha256sum "$keys"/* >"$dir/sums"
expect 0 "$ctl" keys "$keys" --tenant alpha --tenant gamma
says '^export ATTND_ENDPOINT=tls.tcp://localhost:7471$' # the name that the certificate has
sha256sum --quiet -c "$dir/sums" 2>/dev/null | grep -v tenants.conf && die "keys were made anew"
grep -q '^\[gamma\]$' "$keys/tenants.conf" || die "no tenant was added"
[[ $(grep -c '^\[alpha\]$' "$keys/tenants.conf") == 1 ]] || die "a tenant was added twice"
expect 1 "$ctl" keys "$keys" --tenant 'a b'
says 'tenant "a b": a name has'
expect 1 "$ctl" keys /proc/keys
for wrong in '--tenant ca' '--tenant a/b' '--host a,b'; do # before anything is written
  expect 1 "$ctl" keys "$dir/odd" --tenant good $wrong
  [[ ! -e $dir/odd ]] || die "a folder for $wrong"
done
mkdir "$dir/odd"
mkfifo "$dir/odd/tenants.conf"
expect 1 timeout 60 "$ctl" keys "$dir/odd"
says 'odd/tenants.conf is no regular file'
rm "$dir/odd/tenants.conf"
expect 0 "$ctl" keys "$dir/odd" # the token that was in no tenants.conf is made anew
grep -q "$(tr -d '\n' <"$dir/odd/workers.token" | sha256sum | cut -d' ' -f1)" "$dir/odd/tenants.conf" || die "not its hash"
expect 2 "$ctl" keys
for words in '--json keys' 'keys --json'; do
  expect 0 "$ctl" $words "$keys" --tenant alpha
  python3 -c "import json, sys; x = json.load(open('$dir/out')); [open(p).close() for p in (x['ca'], x['server_cert'],
    x['server_key'], x['tenants_file'], x['tenants'][0]['token'])]; sys.exit(x['tenants'][0]['tenant'] != 'alpha')" ||
    die "keys as JSON: $(cat "$dir/out")"
done
expect 1 bash -c "'$ctl' keys '$keys' >/dev/full"
says 'write to stdout: No space'
expect 2 "$ctl" keys "$dir/k" --days 0
expect 0 "$ctl" keys "$dir/foreign" --host localhost
[[ -e $dir/foreign/ca.crt ]] || die "no second CA"

# --- listeners that do not open
refused() { # CODE WORDS FLAG...; --check-config says the same
  local want=$1 words=$2 check
  shift 2
  for check in --check-config ''; do
    expect "$want" timeout 60 "$bin/attnd" --backend cpu --device.kv_memory 64M --listen.http off "$@" $check
    grep 'level=error' "$dir/err.log" | grep -qE -e "$words" || die "no \"$words\": $(cat "$dir/err.log")"
  done
}
tls=(--listen tls+tcp://127.0.0.1:0 --listen.tls_cert "$keys/server.crt" --listen.tls_key "$keys/server.key")
refused 64 'tcp://\*:7471 .*listen.insecure_tcp' --listen 'tcp://*:7471'
refused 64 'tcp://\*:7471 .*listen.tenants' --listen 'tcp://*:7471' --listen.insecure_tcp yes
refused 78 'tls_key: .*/alpha.key is not the key of listen.tls_cert' "${tls[@]}" --listen.tls_key "$keys/alpha.key"
refused 78 'tls_cert: .*/server.key holds no certificate' "${tls[@]}" --listen.tls_cert "$keys/server.key"
refused 78 'tls_ca: .*/nowhere: No such file' "${tls[@]}" --listen.tls_ca "$dir/nowhere"
chmod 0644 "$keys/server.key"
refused 78 'tls_key: .*/server.key has mode 0644.*chmod' "${tls[@]}"
chmod 0600 "$keys/server.key"
refused 78 'tenants: .*/server.crt:[0-9]+: ' "${tls[@]}" --listen.tenants "$keys/server.crt"

# --- one that does, and one that says loudly that it is open
sed -i 's/^\[alpha\]$/[alpha]\nusers = 12345/' "$keys/tenants.conf"
start --device.kv_memory 256M "${tls[@]}" --listen "tcp://*:0 ipc://$dir/sock" --listen.insecure_tcp yes \
  --listen.tenants "$keys/tenants.conf"
grep -q 'level=warn .*tcp://\*:0 is NOT ENCRYPTED' "$log" || die "nothing is said of the open listener"
port=$(grep -oE 'listening on tls\+tcp://127.0.0.1:[0-9]+' "$log" | grep -oE '[0-9]+$')
open=$(grep -oE 'listening on tcp://(0\.0\.0\.0|\[::\]):[0-9]+' "$log" | grep -oE '[0-9]+$')
export ATTND_ENDPOINT=tls+tcp://$host:$port ATTND_CA_FILE=$keys/ca.crt ATTND_KEY_FILE=$keys/alpha.token
expect 0 "$ctl" ping
expect 0 "$ctl" --json stats
says '"tenant": ?"alpha"'
# a tenant is told how the daemon is, and of its own work; pools of all are the operator's
expect 0 "$ctl" --json status
python3 -c "import json,sys; x=json.load(open('$dir/out')); sys.exit(not (x['state'] == 'ready' and 0 <= x['up_seconds'] < 3600 and x['tenant_sessions'] > 0 and 'sessions' not in x))" ||
  die "status of a tenant: $(cat "$dir/out")"
expect 0 "$ctl" top --count 2 --interval 0.1
says '^ +steps/s refused/s +busy% .* pool_blocks$'
[[ $(wc -l <"$dir/out") == 3 ]] || die "not a head and two lines: $(cat "$dir/out")"
expect 0 "$ctl" --json top --count 1 --interval 0.1
says '"tenant": "alpha", "steps_per_second": 0.0, .*"sessions": [1-9]'
expect 0 "$ctl" latency
says "no times: with tenants they are the operator's"
expect 1 "$ctl" pool list
for preset in bytelm llama3-8b; do
  expect 0 "$load" --preset $preset --workers 3 --context 100 --steps 6 --json --verify
  says '"mismatched": 0'
done
# * is every address of this host: those of IPv4, whose peers are named as such, and of IPv6
expect 0 "$ctl" --endpoint "tcp://127.0.0.1:$open" ping
grep -qE 'msg="session begins" .*127\.0\.0\.1' "$log" || die "no peer 127.0.0.1 in the log"
grep -q '::ffff' "$log" && die "a peer of IPv4 is named as one of IPv6"
if grep -q '^0*1 ' /proc/net/if_inet6 2>/dev/null; then # ::1
  expect 0 "$ctl" --endpoint "tcp://[::1]:$open" ping
fi

# --- local users are the tenant that lists them, and nobody without one
if [[ $(id -u) == 0 ]] && command -v setpriv >/dev/null; then
  chmod 0711 "$dir"
  chmod 0666 "$dir/sock"
  as() { env -u ATTND_KEY_FILE setpriv --reuid "$1" --regid "$1" --clear-groups "$ctl" --endpoint "ipc://$dir/sock" "${@:2}"; }
  expect 0 as 12345 --json stats
  says '"tenant": ?"alpha"'
  expect 1 as 12346 --json stats
  says 'uid 12346 is no tenant'
fi

# --- tenants as the operator sees them
op=(env -u ATTND_KEY_FILE "$ctl" --endpoint "ipc://$dir/sock")
expect 0 "${op[@]}" --json tenants
says '"tenant": "alpha", "blocks": [1-9][0-9]*, "max_blocks": null, .*"pools": [1-9][0-9]*, "max_pools": null, .*"steps": [1-9][0-9]*, "steps_failed": 0'
"$load" --preset bytelm --sequences 1 --duration 600 >"$dir/load" 2>&1 &
loader=$!
await knows sequences alpha
sequence=$(grep -oE '"sequence": "[0-9]+"' "$dir/out" | grep -oE '[0-9]+' | head -1)
expect 1 "${op[@]}" kill sequence "$sequence"
says 'is not open'
expect 1 "${op[@]}" kill sequence "$sequence" --tenant nobody
says 'no tenant is named "nobody"'
expect 1 "${op[@]}" kill sequence "$sequence" --tenant beta
expect 0 "${op[@]}" kill sequence "$sequence" --tenant alpha
wait "$loader" && die "the load goes on without its sequence"
expect 1 "$ctl" tenants
says "only root and the daemon's user"

# --- another file of tenants and another certificate, while workers work
loads() { # TENANT: a load of its own in the background
  ATTND_KEY_FILE=$keys/$1.token "$load" --preset bytelm --sequences 1 --duration 600 >"$dir/load.$1" 2>&1 &
  await knows sequences "$1"
}
loads alpha
alpha=$!
loads beta
beta=$!
cp "$keys/tenants.conf" "$dir/tenants.conf"
sed -i '/^\[beta\]/,/^$/d' "$keys/tenants.conf"
printf '[delta]\ntoken_sha256 = %s\n' "$(printf secret | sha256sum | cut -d' ' -f1)" >>"$keys/tenants.conf"
(umask 077 && printf 'secret\n' >"$dir/delta.token")
expect 0 "${op[@]}" reload
expect 1 env ATTND_KEY_FILE="$keys/beta.token" "$ctl" ping
says 'hello.token is refused'
expect 0 env ATTND_KEY_FILE="$dir/delta.token" "$ctl" --json stats
says '"tenant": ?"delta"'
wait "$beta" && die "the load of a tenant that is gone goes on"
await knows_not 'pool list' beta
says '"tenant": "alpha"'
says_not() { grep -qE -e "$1" "$dir/out" && die "\"$1\" in: $(cat "$dir/out")" || true; }
expect 0 "${op[@]}" --json tenants
says '"tenant": "delta"'
says_not '"tenant": "beta"'
grep -qE 'msg="session ends" .* why="its tenant is gone"' "$log" || die "no end in the log"
printf 'nonsense\n' >>"$keys/tenants.conf"
expect 1 "${op[@]}" reload
says 'the settings stay as they are: listen.tenants: .*/tenants.conf:[0-9]+: '
expect 0 env ATTND_KEY_FILE="$dir/delta.token" "$ctl" ping
cp "$dir/tenants.conf" "$keys/tenants.conf"
kill -HUP "$daemon" # the other way; what was gone is back
is_back() { ATTND_KEY_FILE=$keys/beta.token "$ctl" ping >"$dir/out" 2>&1; }
await is_back

mkdir "$dir/old"
cp "$keys"/server.* "$keys/ca.crt" "$dir/old/"
expect 0 "$ctl" keys "$dir/new" --host localhost --host 127.0.0.1
cp "$dir/new/server.crt" "$keys/server.crt" # without its key
expect 1 "${op[@]}" reload
says 'the settings stay as they are: listen.tls_key: .* is not the key of listen.tls_cert'
# a setting whose change is refused stays as it was, where it is from, too
expect 1 "${op[@]}" config set listen.tls_min_version 1.2
says 'listen.tls_key: .* is not the key of listen.tls_cert'
expect 0 "${op[@]}" config get listen.tls_min_version
has '^value 1.3$'
has '^origin default$'
expect 0 "$ctl" ping
cp "$dir/new/server.key" "$keys/server.key"
expect 0 "${op[@]}" reload
expect 1 "$ctl" ping
says 'unknown CA'
expect 0 env ATTND_CA_FILE="$dir/new/ca.crt" "$ctl" ping
kill -0 "$alpha" || die "a worker that was connected is not any more: $(cat "$dir/load.alpha")"
steps() { "${op[@]}" --json tenants | grep -oE '"tenant": "alpha".*' | grep -oE '"steps": [0-9]+' | grep -oE '[0-9]+' | head -1; }
before=$(steps)
goes_on() {
  kill -0 "$alpha" || die "the load ended: $(cat "$dir/load.alpha")"
  [[ $(steps) -gt $before ]]
}
await goes_on
cp "$dir/old"/server.* "$keys/"
expect 0 "${op[@]}" reload
expect 0 "$ctl" ping
kill "$alpha"
wait "$alpha" || true

# --- credentials that are wrong
expect 1 env -u ATTND_KEY_FILE "$ctl" ping
says 'unauthenticated: hello has no token'
expect 1 env ATTND_KEY_FILE="$dir/foreign/workers.token" "$ctl" ping
says 'unauthenticated: hello.token is refused'
expect 1 env ATTND_KEY_FILE="$dir/none" "$ctl" ping
says 'token_file .*/none \(ATTND_KEY_FILE\): No such file'
expect 1 env ATTND_CA_FILE="$dir/foreign/ca.crt" "$ctl" ping
says 'unknown CA'
expect 1 env ATTND_CA_FILE="$dir/none" "$ctl" ping
says 'ca_file .*/none \(ATTND_CA_FILE\): No such file'
expect 1 env ATTND_CA_FILE="$log" "$ctl" ping
says 'ca_file .*/log \(ATTND_CA_FILE\): no certificate'
expect 1 env ATTND_TLS_CERT_FILE="$dir/none" ATTND_TLS_CERT_KEY_FILE="$keys/beta.key" "$ctl" ping
says 'cert_file .*/none \(ATTND_TLS_CERT_FILE\): No such file'
expect 1 env ATTND_TLS_CERT_FILE="$keys/beta.crt" ATTND_TLS_CERT_KEY_FILE="$dir/none" "$ctl" ping
says 'cert_key_file .*/none \(ATTND_TLS_CERT_KEY_FILE\): No such file'
expect 1 "$ctl" --endpoint "tcp://127.0.0.1:$port" ping
says 'no connection to tcp://127.0.0.1:[0-9]+: the peer hung up in the handshake: is its address tls\+tcp://'
expect 1 env -u ATTND_KEY_FILE "$ctl" --endpoint "tcp://127.0.0.1:$open" ping
says 'unauthenticated: hello has no token'
expect 1 "$ctl" --endpoint "tls+tcp://127.0.0.1:$open" ping
says 'TLS with 127.0.0.1'
expect 1 "$ctl" drain
says "drain is for root"
stop

# --- certificates of workers in place of tokens
start "${tls[@]}" --listen.tls_ca "$keys/ca.crt" --listen.tenants "$keys/tenants.conf"
port=$(grep -oE 'listening on tls\+tcp://127.0.0.1:[0-9]+' "$log" | grep -oE '[0-9]+$')
unset ATTND_KEY_FILE
export ATTND_ENDPOINT=tls+tcp://$host:$port
expect 1 "$ctl" ping
says 'wants a certificate'
export ATTND_TLS_CERT_FILE=$keys/beta.crt ATTND_TLS_CERT_KEY_FILE=$keys/beta.key
expect 0 "$ctl" --json stats
says '"tenant": ?"beta"'
expect 1 env ATTND_KEY_FILE="$keys/alpha.token" "$ctl" ping
says "another tenant's"
expect 1 env -u ATTND_TLS_CERT_KEY_FILE "$ctl" ping
says 'need each other'
stop

# --- an operator who waits for a daemon whose only Unix socket will be the operators'
unset ATTND_TLS_CERT_FILE ATTND_TLS_CERT_KEY_FILE
"$ctl" --endpoint "ipc://$dir/later" --wait 60 ping >"$dir/waited.log" 2>&1 &
beside=$!
start "${tls[@]}" --listen.admin "ipc://$dir/later.admin"
wait "$beside" || die "attnctl does not find the admin socket that came after it"
beside=
stop
echo "networked workers can connect"
